"""Engines that the tests of a session share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from services.engine.engine import Engine, load_engine
from tests.engine import tiny

MakeEngine = Callable[..., Engine]
BATCH_MEMORY = 2**20


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of one of the tiny models."""
    root = tmp_path_factory.mktemp("models")
    return lambda name: tiny.saved(name, root)


@pytest.fixture(scope="session")
def tiny_engine(tiny_dir: Callable[[str], Path]) -> MakeEngine:
    """A float32 engine on one of the tiny models; the same arguments give the same engine."""

    @cache
    def make(name: str, page_tokens: int = 16, which: int = 0, device: str = "cpu") -> Engine:
        return load_engine(
            tiny_dir(name),
            dtype="float32",
            device=device,
            page_tokens=page_tokens,
            kv_cache_memory=4 * 2**20,
            threads=1,
            batch_memory=BATCH_MEMORY,
        )

    return make
