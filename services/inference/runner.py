"""The `Runner` protocol: how an engine computes the logits of a step."""

from collections import abc
from typing import Protocol

import torch

from baton.engine_interface import Row, Sequence


class Runner(Protocol):
    """Computes the logits of steps over one KV cache. One step at a time."""

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        """Return [N, vocabulary] logits at the wanted positions of the checked `rows`, row by row.

        Writes the keys and values of all fed tokens to their pages. On a GPU the work may be queued when it
        returns. All ranks call it. Ranks without logits get None.
        """

    def record(self) -> None:
        """Record steps that are replayed later, if this runner does so. Before any page is in use."""

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence, as `Engine.release` says. Another thread may be computing a step meanwhile."""


class StatelessRunner:
    """Base of runners that store nothing by sequence."""

    def release(self, sequence: Sequence) -> None:
        """Do nothing: nothing is stored by sequence."""
