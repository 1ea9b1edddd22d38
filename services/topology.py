"""Topology of a worker: the dimensions in which its ranks split a model, and the coordinates of each rank.

The tensor dimension runs fastest, then context, then pipeline, so that the ranks that communicate most are
adjacent. Agreement uses rank numbers only, and does not depend on these dimensions.
"""

from dataclasses import dataclass
from typing import Final

RANKS_MAX: Final = 1024
"""Most ranks that one worker may have."""


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """Index of one rank in each parallel dimension: tensor, pipeline and context."""

    tensor: int
    pipeline: int
    context: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Numbers of ranks into which a worker splits a model, by dimension: tensor, pipeline and context."""

    tensor: int = 1
    """Number of ranks that split the heads and the width of every layer (tensor parallel)."""
    pipeline: int = 1
    """Number of ranks that split the layers (pipeline parallel)."""
    context: int = 1
    """Number of ranks that split the positions of a sequence (context parallel). Such ranks are placed and
    vote, but no engine computes with more than one yet."""

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.context) < 1:
            raise ValueError(f"{self}: every dimension has one rank at least")
        if self.ranks > RANKS_MAX:
            raise ValueError(f"{self}: {self.ranks} ranks, a worker has {RANKS_MAX} at most")

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of a rank number. Raises ValueError if there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}")
        rest, tensor = divmod(rank, self.tensor)
        pipeline, context = divmod(rest, self.context)
        return RankCoordinates(tensor, pipeline, context)


ONE_RANK: Final = Topology()
