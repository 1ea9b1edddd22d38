"""Tests of transfer plans: each byte of a room's pages reaches its place in every receiver rank once, and
nothing else is written."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import lcm
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.pages.errors import LayoutMismatch, Truncated
from baton.pages.layout import KvGroup, KvKind, KvLayout, KvPlane, full_group, state_group
from baton.pages.rank_layout import rank_layout
from baton.pages.transfer_plan import (
    POSITIONS_MAX,
    GroupPlan,
    HandoverPlan,
    PageRun,
    TransferPlan,
    plan_hand_over,
    windows,
)
from baton.topology import RANKS_MAX, Topology
from tests.layouts import changed, one_group

GROUP = full_group("bfloat16", 16, (0, 1), (0, 1, 2), 64)
LAYOUT = KvLayout("model", (GROUP,))
SMOLLM2 = one_group("smollm2", "bfloat16", 16, tuple(range(30)), (0, 1, 2), 64)
PAGE_BYTES = SMOLLM2.groups[0].page_bytes
TWO_HEADS = changed(SMOLLM2, heads=(0, 1))
PLANES: Final = (KvPlane("k", 64), KvPlane("v", 32))
NOISE: Final = 0xEE

runs_lists = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 500), st.integers(1, 60)),  # source, target, length
    max_size=6,
)


def ranks_of(whole: KvLayout, topology: Topology) -> list[KvLayout]:
    return [rank_layout(whole, topology, rank) for rank in range(topology.ranks)]


def planned(whole: KvLayout, senders: Topology, receivers: Topology) -> HandoverPlan:
    return plan_hand_over(ranks_of(whole, senders), ranks_of(whole, receivers))


# ---- any groups, shapes, page sizes, prefixes and chunks


@dataclass(frozen=True)
class Handover:
    senders: list[KvLayout]
    receivers: list[KvLayout]
    first: int
    end: int
    """End of the room's tokens, exclusive."""
    cuts: list[int]
    """Positions, ascending, whole pages of the smaller size in every group but for the last: the first is
    where the prefix ends or behind it, the last the room's end."""
    sources: list[list[list[int]]]
    """Each sender rank's page tables by group, from position 0 on."""
    targets: list[list[list[int]]]
    """Each receiver rank's pages by group, from `first` on."""


@st.composite
def topologies(draw: st.DrawFn, whole: KvLayout) -> Topology:
    counts = [len(group.heads) for group in whole.groups]
    divides = [
        ranks for ranks in range(1, 7) if all(each % ranks == 0 or ranks % each == 0 for each in counts)
    ]
    return Topology(draw(st.sampled_from(divides)), draw(st.integers(1, len(whole.layers))))


SIZES: Final = [(2, 2), (1, 1), (3, 3), (1, 3), (2, 4), (2, 6), (3, 6)]


@st.composite
def handovers(draw: st.DrawFn) -> Handover:
    """Draw a hand-over of one or two KV groups, and maybe of states. Each group has its own layers and vector
    lengths, and as many heads as the first or a multiple."""
    ids = st.lists(st.integers(0, 30), min_size=1, max_size=3, unique=True).map(sorted).map(tuple)
    heads = draw(ids)
    groups, others = [], []
    for number in range(draw(st.integers(1, 2))):
        tokens, other_tokens = draw(st.permutations(draw(st.sampled_from(SIZES))))
        layers = tuple(2 * layer + number for layer in draw(ids))
        here = heads if number == 0 else tuple(range(draw(st.integers(1, 2)) * len(heads)))
        planes = tuple(KvPlane(name, 2 * draw(st.integers(1, 2))) for name in "kv")
        groups.append(KvGroup(KvKind.FULL, "bfloat16", tokens, layers, here, planes))
        others.append(replace(groups[-1], page_tokens=other_tokens))
    has_states = draw(st.booleans())
    if has_states:
        layers = tuple(100 + layer for layer in draw(ids))
        here = heads if draw(st.booleans()) else heads[:1]
        planes = tuple(KvPlane(name, 2 * draw(st.integers(1, 3))) for name in ("convolution", "recurrent"))
        states = state_group("bfloat16", 64, layers, here, planes)
        groups.append(states)
        others.append(states)
    whole, other = KvLayout("model", tuple(groups)), KvLayout("model", tuple(others))
    shapes = [draw(topologies(whole)) for _ in range(2)]
    senders, receivers = ranks_of(whole, shapes[0]), ranks_of(other, shapes[1])
    end = draw(st.integers(1, 20))
    first = 0 if has_states else draw(st.integers(0, end // other.block_tokens)) * other.block_tokens
    pairs = zip(groups, others, strict=True)
    small = lcm(*(min(one.page_tokens, both.page_tokens) for one, both in pairs if not one.is_state))
    places = st.integers(first // small, end // small).map(lambda place: place * small)
    cuts = sorted([draw(st.just(first) | places), *draw(st.lists(places, max_size=4)), end])

    def table(pages: int) -> list[int]:
        return draw(st.permutations(range(pages + 2)))[:pages]

    return Handover(
        senders,
        receivers,
        first,
        end,
        cuts,
        [[table(group.pages_for(end)) for group in layout.groups] for layout in senders],
        [[table(group.pages_for(end - first)) for group in layout.groups] for layout in receivers],
    )


def filled(group: KvGroup, table: Sequence[int], first: int, positions: range) -> bytes:
    """Return the memory of a group in which the pages of `table` hold `positions`. `first`: the position with
    which the first page begins. Each vector has its own content, and the rest is noise."""
    memory = bytearray([NOISE]) * ((max(table, default=-1) + 3) * group.page_bytes)
    if group.is_state:  # of all positions before the end
        positions, first = range(positions.stop - 1, positions.stop), positions.stop - 1
    for position in positions:
        page, token = divmod(position - first, group.page_positions)
        at = table[page] * group.page_bytes
        for head, layer, (number, plane) in product(group.heads, group.layers, enumerate(group.planes)):
            vector = struct.pack("BBBB", layer, head, number, position) * (plane.elements // 2)
            memory[at + token * len(vector) : at + (token + 1) * len(vector)] = vector
            at += group.page_positions * len(vector)
    return bytes(memory)


@given(handovers())
def test_every_byte_reaches_its_place_in_every_receiver_rank_once_and_nothing_else_is_written(
    handover: Handover,
) -> None:
    first, (start, *_), end = handover.first, handover.cuts, handover.end
    plan = plan_hand_over(handover.senders, handover.receivers)
    sources = [
        [filled(group, table, 0, range(end)) for group, table in zip(layout.groups, tables, strict=True)]
        for layout, tables in zip(handover.senders, handover.sources, strict=True)
    ]
    for receiver, (layout, tables) in enumerate(zip(handover.receivers, handover.targets, strict=True)):
        expected = [
            filled(group, table, first, range(start, end))
            for group, table in zip(layout.groups, tables, strict=True)
        ]
        memory = [bytearray([NOISE]) * len(each) for each in expected]
        written = [bytearray(len(each)) for each in expected]
        for (begin, stop), (sender, source) in product(pairwise(handover.cuts), enumerate(sources)):
            between = plan.between(sender, receiver)
            ends = begin < stop == handover.end or first == handover.end
            by_group = between.runs(handover.sources[sender], tables, first, begin, stop, ends=ends)
            assert not (between.empty and any(by_group))
            for group, runs in enumerate(by_group):
                for at, to, length in runs:
                    there = slice(to, to + length)
                    assert 0 < length == len(written[group][there])
                    assert not any(written[group][there]), "written twice"
                    written[group][there] = b"\1" * length
                    memory[group][there] = source[group][at : at + length]
        assert memory == expected


@given(handovers())
def test_runs_that_could_be_one_are_one(handover: Handover) -> None:
    """With pages of one size, neighbouring runs are merged. With other sizes this holds within a piece, since
    the next larger page may be its neighbour."""
    plan = plan_hand_over(handover.senders, handover.receivers)
    for sender, receiver in product(range(len(handover.senders)), range(len(handover.receivers))):
        tables = handover.sources[sender], handover.targets[receiver]
        between = plan.between(sender, receiver)
        by_group = between.runs(*tables, handover.first, handover.first, handover.end, ends=True)
        for group, runs in zip(between.groups, by_group, strict=True):
            pieces = [(*each, length) for length, places in group.blocks for each in places]
            alike = group.source_page_tokens == group.target_page_tokens
            for (at, to, length), (next_at, next_to, _) in pairwise(runs if alike else pieces):
                assert (next_at, next_to) != (at + length, to + length)


# ---- few, large descriptors


def counts(plan: HandoverPlan, senders: int, receivers: int, pages: int) -> Iterator[list[int]]:
    """Yield the numbers of runs for `pages` pages that are scattered on both sides, by sender rank, then
    receiver rank."""
    source, target = range(0, 2 * pages, 2), range(1, 3 * pages, 3)
    for sender in range(senders):
        each = [plan.between(sender, receiver) for receiver in range(receivers)]
        yield [len(between.groups[0].runs(source, target, 0, 0, 16 * pages)) for between in each]


@pytest.mark.parametrize(
    ("whole", "senders", "receivers", "per_page"),
    [
        (SMOLLM2, Topology(), Topology(), [[1]]),
        (SMOLLM2, Topology(1), Topology(3), [[1, 1, 1]]),
        (SMOLLM2, Topology(3), Topology(1), [[1], [1], [1]]),
        (SMOLLM2, Topology(3), Topology(3), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        (SMOLLM2, Topology(pipeline=2), Topology(), [[3], [3]]),
        (SMOLLM2, Topology(pipeline=3), Topology(3), [[1, 1, 1]] * 3),
        (SMOLLM2, Topology(3, 2), Topology(), [[1]] * 6),
        (TWO_HEADS, Topology(4), Topology(2), [[1, 0], [0, 0], [0, 0], [0, 1]]),
        (TWO_HEADS, Topology(2), Topology(4), [[1, 1, 0, 0], [0, 0, 1, 1]]),
        (TWO_HEADS, Topology(4), Topology(4), [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]),
        (TWO_HEADS, Topology(4), Topology(1), [[1], [0], [1], [0]]),
        (TWO_HEADS, Topology(1), Topology(4), [[1, 1, 1, 1]]),
    ],
    ids=lambda each: f"tp{each.tensor}pp{each.pipeline}" if isinstance(each, Topology) else None,
)
def test_a_page_goes_in_few_large_runs(
    whole: KvLayout, senders: Topology, receivers: Topology, per_page: list[list[int]]
) -> None:
    plan = planned(whole, senders, receivers)
    pages = 5
    assert list(counts(plan, senders.ranks, receivers.ranks, pages)) == [
        [pages * runs for runs in row] for row in per_page
    ]
    for sender, receiver in product(range(senders.ranks), range(receivers.ranks)):
        assert plan.between(sender, receiver).empty == (per_page[sender][receiver] == 0)


def test_a_tensor_rank_s_share_of_a_page_is_one_run_of_it() -> None:
    between = planned(SMOLLM2, Topology(1), Topology(3)).between(0, 2).groups[0]
    page = PAGE_BYTES
    assert between.runs([4, 9], [5, 1], 0, 0, 32) == [
        (4 * page + page * 2 // 3, 5 * page // 3, page // 3),
        (9 * page + page * 2 // 3, page // 3, page // 3),
    ]


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 6))
def test_neighbouring_pages_of_equal_ranks_become_one_run(source: int, target: int, count: int) -> None:
    between = planned(SMOLLM2, Topology(3), Topology(3)).between(1, 1).groups[0]
    runs = between.runs(range(source, source + count), range(target, target + count), 0, 0, 16 * count)
    page = PAGE_BYTES // 3
    assert runs == [(source * page, target * page, count * page)]


def test_runs_break_where_either_side_does() -> None:
    between = planned(LAYOUT, Topology(), Topology()).between(0, 0).groups[0]
    page = GROUP.page_bytes
    runs = between.runs([1, 2, 3, 7], [4, 5, 9, 10], 0, 0, 64)
    assert runs == [
        (page, 4 * page, 2 * page),
        (3 * page, 9 * page, page),
        (7 * page, 10 * page, page),
    ]


@pytest.mark.parametrize("size", [8, 16, 32])
def test_a_part_of_a_larger_page_goes_strip_by_strip(size: int) -> None:
    """With pages of one size, no page is a part of another, so it goes in one run."""
    between = plan_hand_over([LAYOUT], [changed(LAYOUT, page_tokens=size)]).between(0, 0).groups[0]
    runs = between.runs([0, 1], [2] * 4, 0, 16, 32)
    strips = len(GROUP.planes) * len(GROUP.layers) * len(GROUP.heads)
    assert len(runs) == {8: 2 * strips, 16: 1, 32: strips}[size]
    assert sum(length for _, _, length in runs) == GROUP.page_bytes


@pytest.mark.parametrize(("start", "stop"), [(16, 23), (20, 32), (20, 23)])
def test_what_is_no_whole_page_on_either_side_is_a_bug_here(start: int, stop: int) -> None:
    between = planned(LAYOUT, Topology(), Topology()).between(0, 0).groups[0]
    with pytest.raises(ValueError, match=f"positions {start} to {stop} are no whole pages of 16"):
        between.runs([0, 1], [2, 3], 0, start, stop)


# ---- how much is planned at once


@given(handovers(), st.integers(1, 4_000), st.integers(1, 40))
def test_a_stretch_makes_no_more_bytes_and_runs_than_it_may_or_is_one_piece(
    handover: Handover, length: int, count: int
) -> None:
    """However the pages lie. States do not count: they are sent once, with the last positions."""
    plan = plan_hand_over(handover.senders, handover.receivers)
    for sender, receiver in product(range(len(handover.senders)), range(len(handover.receivers))):
        between = plan.between(sender, receiver)
        grows = [group for group in between.groups if not (group.empty or group.is_state)]
        if not grows:
            assert between.empty or between.stretch(length, count) == POSITIONS_MAX
            continue
        stop, least = between.stretch(length, count), between.stretch(1, 1)
        assert stop > 0
        assert all(stop % group.piece_tokens == 0 for group in grows)
        scattered = (
            [range(0, 4 * stop, 2)] * len(between.groups),
            [range(1, 6 * stop, 3)] * len(between.groups),
        )
        runs = [run for group in between.runs(*scattered, 0, 0, stop, ends=False) for run in group]
        if stop > least:
            assert sum(run[2] for run in runs) <= length
            assert len(runs) <= count


# ---- tables that do not reach


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ([1, 2], [3, 4, 5], "48 positions to send, 2 pages of 16"),
        ([1, 2, 3], [4], "48 positions to fill, 1 pages from position 0 on"),
        ([], [], "48 positions to send, 0 pages of 16"),
    ],
)
def test_no_truncation_a_table_that_does_not_reach_is_an_error(
    source: list[int], target: list[int], text: str
) -> None:
    between = planned(LAYOUT, Topology(), Topology()).between(0, 0).groups[0]
    with pytest.raises(Truncated, match=text):
        between.runs(source, target, 0, 0, 48)


@pytest.mark.parametrize(("first", "start"), [(8, 16), (-16, 0), (32, 16)])
def test_a_prefix_within_a_page_or_behind_the_start_is_a_bug_here(first: int, start: int) -> None:
    between = planned(LAYOUT, Topology(), Topology()).between(0, 0).groups[0]
    with pytest.raises(ValueError, match=f"positions {start} on, into pages of 16 from {first} on"):
        between.runs([1, 2, 3], [1, 2, 3], first, start, 48)


def test_zero_positions_are_zero_runs() -> None:
    between = planned(LAYOUT, Topology(), Topology()).between(0, 0).groups[0]
    assert between.runs([], [], 0, 0, 0) == []
    assert between.runs([1, 2], [], 32, 32, 32) == []
    assert windows([], 10) == []


def test_an_empty_plan_carries_nothing() -> None:
    assert TransferPlan((GroupPlan(16, 16),)).empty
    assert TransferPlan((GroupPlan(16, 16),)).runs([[1]], [[2]], 0, 0, 16, ends=True) == [[]]


# ---- what does not map


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("model", "other", "model of sender rank 0, other of receiver rank 0"),
        ("dtype", "float32", "bfloat16 of sender rank 0, float32 of receiver rank 0"),
        ("quantize", "int8", "none of sender rank 0, int8 of receiver rank 0"),
        ("planes", PLANES, "k 64, v 64 of sender rank 0, k 64, v 32 of receiver rank 0"),
        ("encoding", "vllm-cpu-vec", "plain of sender rank 0, vllm-cpu-vec of receiver rank 0"),
        ("context_length", 4096, "0 of sender rank 0, 4096 of receiver rank 0"),
        ("page_tokens", 24, "16 of the sender, 24 of the receiver: neither is a multiple"),
        ("page_tokens", 12, "16 of the sender, 12 of the receiver: neither is a multiple"),
        ("layers", (0,), "1 of the sender alone, none of the receiver"),
        ("layers", tuple(range(20)), "none of the sender alone, 2, 3, 4, 5, 6, 7, 8, 9, … of the receiver"),
        ("heads", (0, 3), "1, 2 of the sender alone, 3 of the receiver"),
    ],
)
def test_schema_agreed_a_mismatch_names_its_field(field: str, value: object, text: str) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(LayoutMismatch, match=f"{field} differs: {text}") as caught:
        plan_hand_over([LAYOUT], [changed(LAYOUT, **changes)])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model", "other"), ("dtype", "float32"), ("quantize", "int4"), ("planes", PLANES)),
        *(("context_length", 9), ("page_tokens", 32), ("encoding", "amx")),
    ],
)
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_schema_agreed_the_ranks_of_one_side_are_alike(side: str, field: str, value: object) -> None:
    changes: dict[str, Any] = {field: value}
    unlike = [LAYOUT, changed(LAYOUT, **changes)]
    with pytest.raises(LayoutMismatch, match=f"of {side} rank 1") as caught:
        plan_hand_over(*((unlike, [LAYOUT]) if side == "sender" else ([LAYOUT], unlike)))
    assert caught.value.field == field


def test_schema_agreed_encoded_pages_go_whole_or_not_at_all() -> None:
    """Encoded pages go between any ranks, but not into pages of another size."""
    encoded = changed(LAYOUT, encoding="amx")
    with pytest.raises(LayoutMismatch, match=r"page_tokens differs: .* encoding amx go whole"):
        plan_hand_over([encoded], [changed(encoded, page_tokens=32)])
    assert planned(encoded, Topology(1), Topology(3)) == planned(LAYOUT, Topology(1), Topology(3))


@pytest.mark.parametrize("field", ["layers", "heads"])
def test_layers_by_id_as_many_under_other_ids_do_not_map(field: str) -> None:
    changes: dict[str, Any] = {field: tuple(each + 1 for each in getattr(LAYOUT.groups[0], field))}
    with pytest.raises(LayoutMismatch, match=f"{field} differs"):
        plan_hand_over([LAYOUT], [changed(LAYOUT, **changes)])


def test_layers_by_id_every_head_of_every_layer_has_a_sender() -> None:
    """Each layer and each head has a sender, but not this head of this layer."""
    senders = [changed(LAYOUT, layers=(0,)), changed(LAYOUT, layers=(1,), heads=(0, 2))]
    with pytest.raises(LayoutMismatch, match="head 1 of layer 1, held by the receiver alone") as caught:
        plan_hand_over(senders, [LAYOUT])
    assert caught.value.field == "heads"
    with pytest.raises(LayoutMismatch, match="head 1 of layer 1, held by the sender alone"):
        plan_hand_over([LAYOUT], senders)


@pytest.mark.parametrize("ranks", [0, RANKS_MAX + 1])
def test_no_ranks_or_too_many_are_refused(ranks: int) -> None:
    for sides in (([LAYOUT] * ranks, [LAYOUT]), ([LAYOUT], [LAYOUT] * ranks)):
        with pytest.raises(LayoutMismatch, match="ranks differs"):
            plan_hand_over(*sides)


# ---- windows


def carried(runs: Sequence[PageRun]) -> list[tuple[int, int]]:
    """(source byte, target byte), in order."""
    return [(at + i, to + i) for at, to, length in runs for i in range(length)]


@given(runs_lists, st.integers(1, 70))
def test_windows_carry_exactly_the_runs_and_none_is_too_large(runs: list[PageRun], window_bytes: int) -> None:
    cut = windows(runs, window_bytes)
    assert carried([run for _, window in cut for run in window]) == carried(runs)
    sizes = [size for size, _ in cut]
    assert sizes == [sum(length for _, _, length in window) for _, window in cut]
    assert all(size == window_bytes for size in sizes[:-1])
    assert all(0 < size <= window_bytes for size in sizes)
    assert all(length > 0 for _, window in cut for _, _, length in window)


@pytest.mark.parametrize("window_bytes", [0, -1])
def test_a_window_of_no_bytes_is_refused(window_bytes: int) -> None:
    with pytest.raises(ValueError, match="carries nothing"):
        windows([(0, 0, 1)], window_bytes)


# ---- the layout itself


def test_the_layouts_arithmetic() -> None:
    """SmolLM2-135M in bf16: 30 layers x K and V x 3 heads x 64 x 2 bytes."""
    (group,) = SMOLLM2.groups
    assert group.token_bytes == 23_040
    assert group.page_bytes == 16 * 23_040


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_pages_hold_all_tokens_and_no_page_is_spare(tokens: int, page_tokens: int) -> None:
    pages = replace(GROUP, page_tokens=page_tokens).pages_for(tokens)
    assert pages * page_tokens >= tokens > (pages - 1) * page_tokens or (tokens, pages) == (0, 0)
