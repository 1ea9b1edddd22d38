"""The `Runner` protocol: the part of an engine that computes the logits of a step."""

from collections import abc
from typing import Protocol

import torch

from baton.engine_interface import Row, Sequence


class Runner(Protocol):
    """Model computation of an engine: runs one step at a time over one KV cache and returns its logits."""

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        """Return logits [N, vocabulary] at the wanted positions of the checked `rows`, row by row.

        Writes the keys and values of all computed tokens to their pages. On a GPU the work may still be
        queued when it returns. All ranks call it. A rank that does not have the model's last layers returns
        None.
        """

    def release(self, sequence: Sequence) -> None:
        """Forget what is stored for a sequence that has ended. Another thread may be computing a step
        meanwhile."""


class StatelessRunner:
    """Base class of runners that store nothing for single sequences."""

    def release(self, sequence: Sequence) -> None:
        """Do nothing, since this runner stores nothing for single sequences."""
