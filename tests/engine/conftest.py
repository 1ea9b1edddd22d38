"""Engines and compiled kernels that the tests of a session share."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from baton.engine.execution import step_compiler
from baton.engine.execution.step_compiler import Build
from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from tests.engine import tiny_models
from tests.engine.execution.compiled_kernels import KERNELS, MODELS, Directory, asked

MakeEngine = Callable[..., TorchEngine]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a tiny model by its name."""
    root = tmp_path_factory.mktemp("models")
    return lambda name: tiny_models.saved(name, root)


@pytest.fixture(scope="session")
def tiny_engine(tiny_dir: Callable[[str], Path]) -> MakeEngine:
    """Return a float32 engine on a tiny model. Equal arguments give the same engine."""

    @cache
    def make(name: str, page_tokens: int = 16, which: int = 0, device: str = "cpu") -> TorchEngine:
        return load_engine(
            tiny_dir(name),
            dtype="float32",
            device=device,
            page_tokens=page_tokens,
            kv_cache_memory=4 * 2**20,
            threads=1,
        )

    return make


@pytest.fixture(params=asked())
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """The build of that name in `KERNELS`, made the only one there is."""
    made = KERNELS[request.param]
    monkeypatch.setattr(step_compiler, "BUILDS", (made,))
    step_compiler.kernel.cache_clear()
    yield made
    step_compiler.kernel.cache_clear()


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """Return the directory of a model for kernels. Weights are in float32, with values of the dtype
    `weights`."""
    root = tmp_path_factory.mktemp("compiled")

    def find(name: str, weights: torch.dtype = torch.float32) -> Path:
        place = root / f"{name} {weights}".replace(" ", "-")
        return place if place.exists() else tiny_models.save(MODELS[name], place, weights)

    return find
