"""Tests of the assignment of layers and KV heads to ranks."""

from collections import Counter
from itertools import pairwise, product
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.pages.errors import DoesNotDivide
from baton.pages.layout import KvLayout
from baton.pages.rank_layout import rank_layout
from baton.topology import RANKS_MAX, RankCoordinates, Topology
from tests.layouts import group_of, one_group

SMOLLM2: Final = one_group("smollm2", "bfloat16", 16, tuple(range(30)), (0, 1, 2), 64)
SIZES: Final = st.integers(1, 5)


def whole(layers: int, heads: int) -> KvLayout:
    """Ids that are no positions."""
    return one_group("m", "bfloat16", 16, tuple(range(10, 10 + layers)), tuple(range(20, 20 + heads)), 64)


def test_tensor_runs_fastest_then_context_then_pipeline() -> None:
    topology = Topology(tensor=2, pipeline=2, context=2)
    assert [topology.coordinates(rank) for rank in range(topology.ranks)] == [
        RankCoordinates(tensor, pipeline, context) for pipeline, context, tensor in product((0, 1), repeat=3)
    ]


@given(SIZES, SIZES, SIZES)
def test_every_rank_has_a_place_of_its_own(tensor: int, pipeline: int, context: int) -> None:
    topology = Topology(tensor, pipeline, context)
    places = [topology.coordinates(rank) for rank in range(topology.ranks)]
    assert len(set(places)) == tensor * pipeline * context
    for rank, place in enumerate(places):
        assert rank == (place.pipeline * context + place.context) * tensor + place.tensor


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_that_is_not_there_has_no_place(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of 6"):
        Topology(3, 2).coordinates(rank)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, -1)])
def test_a_dimension_without_ranks_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="every dimension has one rank at least"):
        Topology(*sizes)


def test_more_ranks_than_a_worker_has_are_refused() -> None:
    assert Topology(RANKS_MAX // 4, 2, 2).ranks == RANKS_MAX
    with pytest.raises(ValueError, match=f"{RANKS_MAX + 4} ranks, a worker has {RANKS_MAX} at most"):
        Topology(RANKS_MAX // 4 + 1, 2, 2)


@given(SIZES, SIZES, SIZES, st.integers(0, 7), st.booleans())
def test_every_head_of_every_layer_is_held_as_often_as_ranks_share_it(
    heads: int, times: int, stages: int, spare_layers: int, replicated: bool
) -> None:
    """`times`: heads a rank, or ranks a head."""
    tensor, heads = (heads * times, heads) if replicated else (heads, heads * times)
    model, topology = whole(stages + spare_layers, heads), Topology(tensor, stages)
    layouts = [rank_layout(model, topology, rank) for rank in range(topology.ranks)]
    held = Counter(place for layout in layouts for place in product(layout.layers, group_of(layout).heads))
    assert held == dict.fromkeys(product(model.layers, group_of(model).heads), times if replicated else 1)
    for layout in layouts:
        for ids in (layout.layers, group_of(layout).heads):
            assert all(one + 1 == other for one, other in pairwise(ids)), "a block"


@given(st.integers(1, 40), st.integers(1, 40))
def test_stages_are_in_order_and_the_first_take_what_does_not_divide(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(DoesNotDivide, match=f"pipeline_parallel {stages}: the model has {layers} layers"):
            rank_layout(whole(layers, 1), Topology(pipeline=stages), 0)
        return
    each = [rank_layout(whole(layers, 1), Topology(pipeline=stages), rank).layers for rank in range(stages)]
    assert sum(each, ()) == whole(layers, 1).layers
    sizes = [len(stage) for stage in each]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("heads", "ranks"), [(3, 2), (2, 3), (4, 6), (8, 12)])
def test_heads_that_do_not_divide_are_refused_by_the_dimension(heads: int, ranks: int) -> None:
    with pytest.raises(
        DoesNotDivide, match=f"tensor_parallel {ranks}: the model has {heads} KV heads"
    ) as caught:
        rank_layout(whole(4, heads), Topology(ranks), 0)
    assert caught.value.field == "tensor_parallel"


def test_neighbouring_ranks_share_a_replicated_head() -> None:
    heads = [group_of(rank_layout(whole(2, 2), Topology(6), rank)).heads for rank in range(6)]
    assert heads == [(20,), (20,), (20,), (21,), (21,), (21,)]


def test_ranks_that_split_positions_hold_the_same_layers_and_heads() -> None:
    topology = Topology(tensor=3, context=2)
    layouts = [rank_layout(SMOLLM2, topology, rank) for rank in range(topology.ranks)]
    assert layouts[:3] == layouts[3:]
    assert [group_of(layout).heads for layout in layouts[:3]] == [(0,), (1,), (2,)]
