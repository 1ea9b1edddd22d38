"""What do the ranks of a worker tell each other within a step?

All ranks compute the same step, so all call the same collectives in the same order. Where a worker is one
rank, `alone()` is its team: the same code runs, and nothing is said to anybody.

A team that is broken stays broken: what was computed with it is not to be used, and the worker ends.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.engine_interface import RankGroupBroken
from baton.topology import Topology


class Team(Protocol):
    """The ranks of one worker as one of them sees them. From one thread at a time.

    Every method raises RankGroupBroken within the team's time-out when another rank does not take part.
    """

    @property
    def topology(self) -> Topology: ...

    @property
    def rank(self) -> int: ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over the tensor ranks of this stage, the same on each. May overwrite `tensor`."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The `tensor` of each tensor rank of this stage, along the last dimension, on the first of them; the
        others get their own back. All bring the same shape."""

    def send(self, tensor: torch.Tensor) -> None:
        """To the same tensor rank of the next stage."""

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """What the same tensor rank of the stage before sends: of the shape and type of `like`."""

    def tell(self, rank: int, words: Sequence[float] | None, count: int) -> list[float]:
        """The `count` words that `rank` brings, on every rank; the others bring None."""

    def total(self, numbers: Sequence[int]) -> list[int]:
        """The sum over all ranks, modulo 2**64, of each of `numbers`, equally many on every rank."""

    def least(self, number: int) -> int:
        """Over all ranks. Waits as long as ranks take to load their parts of a model."""

    def leave(self, why: str) -> RankGroupBroken:
        """This rank cannot go on: the others learn it at once. Returns what to raise."""


class LocalRankGroup:
    """A rank's team of which nobody is there: what others would add is missing."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology = topology
        self.rank = rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """There is no next stage."""

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        return like

    def tell(self, rank: int, words: Sequence[float] | None, count: int) -> list[float]:
        if rank != self.rank or words is None or len(words) != count:
            raise ValueError(f"rank {rank} is to tell {count} words to one rank")
        return list(words)

    def total(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def least(self, number: int) -> int:
        return number

    def leave(self, why: str) -> RankGroupBroken:
        return RankGroupBroken(why)


def alone() -> Team:
    """The team of a worker of one rank."""
    return LocalRankGroup(Topology(), 0)
