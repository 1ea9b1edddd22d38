"""Collective operations of the ranks of a worker within a step.

All ranks compute the same step, so all call the same collectives in the same order. A worker of one rank uses
`alone()`: the same code runs, and nothing is sent.
A rank group that is broken stays broken. What was computed with it is not used, and the worker ends.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.engine_interface import RankGroupBroken
from baton.topology import Topology


class Collectives(Protocol):
    """The ranks of one worker, as one of them sees them. Used from one thread at a time.

    Every method raises RankGroupBroken within the group's timeout if another rank does not take part.
    """

    @property
    def topology(self) -> Topology: ...

    @property
    def rank(self) -> int: ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the tensor ranks of this stage, the same on each. May overwrite `tensor`."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the `tensor` of each tensor rank of this stage, joined along the last dimension, on the
        first of them.

        The others get their own back. All have the same shape.
        """

    def send(self, tensor: torch.Tensor) -> None:
        """Send to the same tensor rank of the next stage."""

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Return what the same tensor rank of the previous stage sends, with the shape and dtype of
        `like`."""

    def broadcast(self, rank: int, words: Sequence[float] | None, count: int) -> list[float]:
        """Return the `count` numbers that `rank` brings, on every rank. The others bring None."""

    def sum_integers(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum over all ranks, modulo 2**64, of each of `numbers`. Every rank has as many."""

    def minimum(self, number: int) -> int:
        """Return the least `number` of all ranks. Waits as long as ranks take to load their parts of a
        model."""

    def leave(self, why: str) -> RankGroupBroken:
        """Leave because this rank cannot go on. The others notice at once. Returns the error to raise."""


class LocalCollectives:
    """A rank's group without the other ranks: their contributions are missing."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology = topology
        self.rank = rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """Do nothing: there is no next stage."""

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        return like

    def broadcast(self, rank: int, words: Sequence[float] | None, count: int) -> list[float]:
        if rank != self.rank or words is None or len(words) != count:
            raise ValueError(f"rank {rank} is to tell {count} words to one rank")
        return list(words)

    def sum_integers(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def minimum(self, number: int) -> int:
        return number

    def leave(self, why: str) -> RankGroupBroken:
        return RankGroupBroken(why)


def alone() -> Collectives:
    """Return the group of a worker of one rank."""
    return LocalCollectives(Topology(), 0)
