"""Collective operations between the ranks of a worker within a step.

All ranks compute the same step, so all call the same collectives in the same order. A worker of one rank uses
`alone()`: the same code runs, and nothing is sent.
A broken rank group stays broken. Results computed with it are not used, and the worker ends.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.engine_interface import RankGroupBroken
from baton.topology import Topology


class Collectives(Protocol):
    """Collective operations of one rank with the other ranks of its worker. Used from one thread at a time.

    Every method raises RankGroupBroken within the group's timeout if another rank does not take part.
    """

    @property
    def topology(self) -> Topology: ...

    @property
    def rank(self) -> int: ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over the tensor-parallel ranks of this pipeline stage, the same on each.

        May overwrite `tensor`.
        """

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all tensor-parallel ranks of this pipeline stage, on the first of these
        ranks.

        They have the same shape and are joined along the last dimension. The other ranks get their own
        `tensor` back.
        """

    def send(self, tensor: torch.Tensor) -> None:
        """Send `tensor` to the rank of the next pipeline stage with the same tensor-parallel index."""

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor sent by the rank of the previous pipeline stage with the same tensor-parallel
        index.

        It has the shape and dtype of `like`.
        """

    def broadcast(self, rank: int, words: Sequence[float] | None, count: int) -> list[float]:
        """Return on every rank the `count` numbers that `rank` sends. The other ranks pass None as
        `words`."""

    def sum_integers(self, numbers: Sequence[int]) -> list[int]:
        """Return the element-wise sum of `numbers` over all ranks, modulo 2**64. All ranks pass lists of one
        length."""

    def minimum(self, number: int) -> int:
        """Return the least `number` of all ranks.

        Its timeout is long enough for ranks that still load their parts of the model.
        """

    def leave(self, why: str) -> RankGroupBroken:
        """Leave the rank group because this rank cannot go on, and return the error to raise.

        The other ranks notice at once. `why`: reason, for the error's text.
        """


class LocalCollectives:
    """Collectives that never communicate: each operation returns this rank's own contribution.

    Used by a worker of one rank, or to compute one rank of several without the others.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology = topology
        self.rank = rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """Do nothing, since there is no next pipeline stage."""

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
    """Return the collectives for a worker that has only one rank."""
    return LocalCollectives(Topology(), 0)
