"""Engines on torch for the conformance suite (`tests/inference/conformance`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from tests.engine import tiny_models
from tests.engine.execution.compiled_kernels import MODELS, load
from tests.engine.execution.test_row_by_row import bloom

WINDOWED: Final = "three queries a head"


def _calls(folder: Path) -> TorchEngine:
    return _loaded(tiny_models.save(tiny_models.ARCHITECTURES["llama-gqa-untied"], folder / "model"))


def _compiled(folder: Path) -> TorchEngine:
    """Load a model that runs compiled where there is a compiler, else by our own pass over the same
    windows."""
    return load(tiny_models.save(MODELS[WINDOWED], folder / "model", torch.float32), dtype=torch.float32)


def _row_by_row(folder: Path) -> TorchEngine:
    return _loaded(bloom(folder / "model"))


def _loaded(directory: Path) -> TorchEngine:
    return load_engine(directory, dtype="float32", device="cpu", kv_cache_memory=2**23, threads=1)


KINDS: Final[dict[str, Callable[[Path], TorchEngine]]] = {
    "calls": _calls,
    "compiled": _compiled,
    "row by row": _row_by_row,
}
