"""The execution of an engine."""

from typing import Final

import torch

from baton.engine.execution.batched_runner import BatchedExecution
from baton.engine.execution.compiled_step import CompiledExecution, CompiledModel, CompiledRunner
from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.torch_engine import TorchEngine

OURS: Final = (ExecutionKind.FUSED, ExecutionKind.COMPILED)


def is_ours(engine: TorchEngine) -> bool:
    """Return whether steps are computed by our own code and not by the library's definition."""
    return engine.execution.kind in OURS


def is_compiled(engine: TorchEngine) -> bool:
    return engine.execution.kind is ExecutionKind.COMPILED


def compiled_model(engine: TorchEngine) -> CompiledModel:
    """Return the weights of an engine whose steps are compiled."""
    assert isinstance(engine.execution, CompiledExecution)
    return engine.execution.model


def compiled_runner(engine: TorchEngine) -> CompiledRunner:
    """Return the runner of an engine whose steps are compiled."""
    assert isinstance(engine.runner, CompiledRunner)
    return engine.runner


def embedding_of(engine: TorchEngine) -> torch.Tensor:
    """Return the embedding that steps of our own read, to be changed in place."""
    if is_compiled(engine):
        return compiled_model(engine).embedding
    assert isinstance(engine.execution, BatchedExecution)
    assert engine.execution.decoder is not None
    return engine.execution.decoder.embedding
