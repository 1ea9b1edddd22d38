"""The `Runner` and `Execution` protocols: how a step's logits are computed.

An execution is a loaded model in one form of computation, and owns its weights. It makes a runner for each KV
cache that is computed over: two where a process serves both sides.
"""

from collections import abc
from typing import Protocol

import torch

from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.execution.paged_rows import PagedKernel
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row


class Runner(Protocol):
    """Computes the logits of steps over one KV cache. One step at a time."""

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        """Return [N, vocabulary] logits at the wanted positions of the checked `rows`, row by row.

        Writes the keys and values of all fed tokens to their pages. All ranks call it. Ranks without logits
        get None.
        """

    def record(self) -> None:
        """Record steps that are replayed later, if this runner does so. Before any page is in use."""


class Execution(Protocol):
    """A loaded model in one form of computation. Owns its weights."""

    @property
    def kind(self) -> ExecutionKind: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, whatever it computes."""

    def runner(self, cache: PagedKvCache, kernel: PagedKernel | None = None) -> Runner:
        """Return a runner over `cache`. `kernel`: attends to keys and values in their pages, on a GPU."""
