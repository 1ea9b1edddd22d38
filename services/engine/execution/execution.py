"""The `Execution` protocol: a loaded model in one form of computation.

An execution owns its weights. It makes a runner for each KV cache that is computed over: two where a process
serves both sides.
"""

from typing import Protocol

from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.execution.paged_rows import PagedKernel
from baton.engine.kv_cache import PagedKvCache
from baton.inference.runner import Runner


class Execution(Protocol):
    """A loaded model in one form of computation. Owns its weights."""

    @property
    def kind(self) -> ExecutionKind: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads, whatever its rows are."""

    def runner(self, cache: PagedKvCache, kernel: PagedKernel | None = None) -> Runner:
        """Return a runner over `cache`. `kernel`: attends to keys and values in their pages, on a GPU."""
