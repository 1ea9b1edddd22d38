"""In which dimensions do the ranks of a worker split a model, and which place has each?

Ranks are numbered with the tensor dimension running fastest, then context, then pipeline: the ranks that talk
most sit next to each other. Agreement knows ranks only; nothing of it depends on these dimensions.
"""

from dataclasses import dataclass
from typing import Final

RANKS_MAX: Final = 1024
"""Of one worker."""


@dataclass(frozen=True, slots=True)
class RankCoordinates:
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

    def coordinates(self, rank: int) -> RankCoordinates:
        """Raises ValueError for a rank that is not there."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}")
        rest, tensor = divmod(rank, self.tensor)
        pipeline, context = divmod(rest, self.context)
        return RankCoordinates(tensor, pipeline, context)


ONE_RANK: Final = Topology()
