"""KV layout of one rank of a worker: its share of the layers and KV heads."""

from dataclasses import replace

from baton.pages.errors import DoesNotDivide
from baton.pages.layout import KvLayout
from baton.topology import Topology


def rank_layout(whole: KvLayout, topology: Topology, rank: int) -> KvLayout:
    """Return the KV layout of one rank of a worker. `whole`: layout of the whole worker.

    Layers are divided among pipeline stages in order, across groups. If they do not divide evenly, the first
    stages take one more. KV heads are divided in blocks among tensor-parallel ranks. If there are fewer heads
    than ranks, adjacent ranks hold the same head. Raises DoesNotDivide.
    """
    place = topology.coordinates(rank)
    stage = frozenset(_block(whole.layers, topology.pipeline, place.pipeline))
    groups = (
        replace(
            group,
            layers=tuple(layer for layer in group.layers if layer in stage),
            heads=_heads(group.heads, topology.tensor, place.tensor),
        )
        for group in whole.groups
    )
    return replace(whole, groups=tuple(groups))


def _block(layers: tuple[int, ...], stages: int, stage: int) -> tuple[int, ...]:
    if stages > len(layers):
        raise DoesNotDivide("pipeline_parallel", stages, f"the model has {len(layers)} layers")
    each, over = divmod(len(layers), stages)
    start = stage * each + min(stage, over)
    return layers[start : start + each + (stage < over)]


def _heads(heads: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    if len(heads) % ranks == 0:
        each = len(heads) // ranks
        return heads[rank * each : (rank + 1) * each]
    if ranks % len(heads) == 0:
        return (heads[rank * len(heads) // ranks],)
    possible = f"the model has {len(heads)} KV heads, which must be a multiple or a divisor of it"
    raise DoesNotDivide("tensor_parallel", ranks, possible)
