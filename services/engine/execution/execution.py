"""The `Execution` protocol: a loaded model with one method of computing its steps.

An execution owns the model's weights. It makes a runner for the KV caches of an engine. There are two
engines if one process serves both prefill and decode.
"""

from collections import abc
from typing import Protocol

from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.kv_cache import EngineCache
from baton.inference.runner import Runner


class Execution(Protocol):
    """A loaded model with one method of computing its steps. It owns the model's weights."""

    @property
    def kind(self) -> ExecutionKind: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads, whatever its rows are."""

    def runner(self, caches: abc.Sequence[EngineCache]) -> Runner:
        """Return a runner that computes steps over the caches of all KV groups."""
