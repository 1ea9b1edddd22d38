"""The execution of an engine, and engines with another runner."""

from typing import Final

import torch

from baton.engine.execution.batched_runner import BatchedRunner
from baton.engine.execution.compiled_step import CompiledExecution, CompiledModel, CompiledRunner
from baton.engine.execution.cuda_graphs import GraphRunner, Recorder
from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.execution.paged_rows import PagedKernel
from baton.engine.loading.runner_selection import BatchedExecution
from baton.engine.torch_engine import TorchEngine
from baton.inference.collectives import alone
from baton.inference.runner import Runner

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


def batched_runner(engine: TorchEngine, kernel: PagedKernel | None = None) -> BatchedRunner:
    """Return a runner that computes the engine's steps call by call."""
    runner = engine.execution.runner(engine.cache, kernel)
    assert isinstance(runner, BatchedRunner)
    return runner


def graph_runner(engine: TorchEngine) -> GraphRunner:
    """Return the runner of an engine that replays steps."""
    assert isinstance(engine.runner, GraphRunner)
    return engine.runner


def replaying(
    engine: TorchEngine, recorder: Recorder, rows_max: int, kernel: PagedKernel | None = None
) -> tuple[TorchEngine, GraphRunner]:
    """Return an engine over the same cache that replays steps, before its warm-up, and its runner."""
    runner = GraphRunner(
        batched_runner(engine, kernel),
        recorder,
        rows_max,
        context_length=engine.context_length,
        vocab_size=engine.vocab_size,
    )
    return with_runner(engine, runner, kernel), runner


def with_runner(engine: TorchEngine, runner: Runner, kernel: PagedKernel | None = None) -> TorchEngine:
    """Return an engine over the same cache with another runner."""
    return TorchEngine(engine.model, engine.whole, engine.cache, alone(), engine.execution, runner, kernel)


def embedding_of(engine: TorchEngine) -> torch.Tensor:
    """Return the embedding that steps of our own read, to be changed in place."""
    if is_compiled(engine):
        return compiled_model(engine).embedding
    assert isinstance(engine.execution, BatchedExecution)
    assert engine.execution.decoder is not None
    return engine.execution.decoder.embedding
