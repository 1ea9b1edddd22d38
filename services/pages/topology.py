"""Which layers and KV heads does each rank of a worker hold?

Ranks are numbered with the tensor dimension running fastest, then context, then pipeline: the ranks that talk
most sit next to each other. Agreement knows ranks only; nothing of it depends on these dimensions.
"""

from dataclasses import dataclass, replace
from typing import Final

from services.pages.errors import DoesNotDivide
from services.pages.layout import KvLayout

RANKS_MAX: Final = 1024
"""Of one worker."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's index in each dimension."""

    tensor: int
    pipeline: int
    context: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks of a worker, in each dimension."""

    tensor: int = 1
    """Ranks that split the heads and the width of every layer."""
    pipeline: int = 1
    """Ranks that split the layers."""
    context: int = 1
    """Ranks that split the positions. Placed, voted and settled; no engine computes it yet."""

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.context) < 1:
            raise ValueError(f"{self}: every dimension has one rank at least")
        if self.ranks > RANKS_MAX:
            raise ValueError(f"{self}: {self.ranks} ranks, a worker has {RANKS_MAX} at most")

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context

    def place(self, rank: int) -> Place:
        """Raises ValueError for a rank that is not there."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}")
        rest, tensor = divmod(rank, self.tensor)
        pipeline, context = divmod(rest, self.context)
        return Place(tensor, pipeline, context)


def rank_layout(whole: KvLayout, topology: Topology, rank: int) -> KvLayout:
    """What one rank holds of a worker that as a whole holds `whole`.

    Layers go to stages in order, whatever groups they are in, the first stages taking one more where they do
    not divide. KV heads go in blocks; where there are fewer than ranks, neighbouring ranks hold the same one.
    Raises DoesNotDivide.
    """
    place = topology.place(rank)
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
