"""The engines that the suite runs on: those of `--engine`."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

from baton.inference.step_engine import StepEngine

ENGINES: Final = {"torch": "tests.engine.conforming", "vllm": "tests.vllm.conforming"}
"""Modules with `KINDS`: functions that start an engine on a small float32 model, in a folder of its own."""

Kinds = dict[str, Callable[[Path], StepEngine]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        metafunc.parametrize("engine", kinds_of(metafunc.config), indirect=True, scope="session")


def kinds_of(config: pytest.Config) -> Kinds:
    kinds: Kinds = import_module(ENGINES[config.getoption("engine")]).KINDS
    return kinds


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StepEngine:
    return kinds_of(request.config)[request.param](tmp_path_factory.mktemp("conforming"))
