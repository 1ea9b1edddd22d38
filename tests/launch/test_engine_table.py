"""Tests that `--engine` chooses an engine by what is installed, and that a missing one is named."""

import subprocess
import sys
from collections.abc import Mapping

import pytest

from baton.launch.engine_table import ENGINES, can_serve_both, choose_engine, engine_module, load_starter
from baton.launch.fork_server import worker_modules
from baton.launch.gpus import Gpus
from baton.runtime.errors import StartupError
from baton.runtime.model_options import EngineName


def chosen(name: str, device: str, packages: tuple[str, ...], gpus: Gpus) -> EngineName:
    def found(_: Mapping[str, str]) -> Gpus:
        return gpus

    return choose_engine(name, device, {}, packages.__contains__, found)


@pytest.mark.parametrize(
    ("device", "packages", "gpus", "engine"),
    [
        ("auto", ("torch", "vllm"), ("0",), EngineName.VLLM),
        ("cuda", ("torch", "vllm"), ("0",), EngineName.VLLM),
        ("cuda:1", ("torch", "vllm"), ("0", "1"), EngineName.VLLM),
        ("auto", ("torch", "vllm"), (), EngineName.TORCH),
        ("cpu", ("torch", "vllm"), ("0",), EngineName.TORCH),
        ("auto", ("torch",), ("0",), EngineName.TORCH),
    ],
)
def test_auto_is_vllm_on_a_gpu_where_it_is_installed(
    device: str, packages: tuple[str, ...], gpus: Gpus, engine: EngineName
) -> None:
    assert chosen("auto", device, packages, gpus) is engine


def test_no_gpu_is_looked_for_where_vllm_is_not_installed() -> None:
    def look(_: Mapping[str, str]) -> Gpus:
        raise AssertionError("a program of the driver is started")

    assert choose_engine("auto", "auto", {}, lambda _: False, look) is EngineName.TORCH


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_named_engine_is_that_one_or_a_line_that_says_what_to_install(engine: str) -> None:
    assert chosen(engine, "cpu", ("torch", "vllm"), ()).value == engine
    with pytest.raises(StartupError, match=rf"^--engine {engine}: the package {engine} is not installed"):
        chosen(engine, "cpu", (), ())


def test_every_engine_but_auto_is_in_the_table_and_named_modules_start_with_baton() -> None:
    assert set(ENGINES) == set(EngineName) - {EngineName.AUTO}
    assert all(entry.module.startswith("baton.") for entry in ENGINES.values())


def test_torchs_starters_are_found() -> None:
    for function in ("start_rank", "start_both"):
        assert load_starter("torch", "cpu", function).__module__ == "baton.engine.engine_startup"
    with pytest.raises(StartupError, match="--engine torch: it does not serve both sides in one process"):
        load_starter("torch", "cpu", "start_three")


@pytest.mark.parametrize(
    ("engine", "device", "gpus", "can"),
    [
        (EngineName.VLLM, "cuda", ("0",), False),
        (EngineName.VLLM, "auto", ("0",), False),
        (EngineName.VLLM, "auto", (), True),
        (EngineName.VLLM, "cpu", ("0",), True),
        (EngineName.TORCH, "cuda", ("0",), True),
    ],
)
def test_an_engine_with_graphs_serves_one_side_in_a_process_on_a_gpu(
    engine: EngineName, device: str, gpus: Gpus, can: bool
) -> None:
    """Its graphs contain the addresses of one side's pages."""
    assert can_serve_both(engine, device, {}, lambda _: gpus) is can


def test_a_fork_server_imports_the_engine_of_its_workers() -> None:
    assert worker_modules("torch", "cpu") == ("baton.both.wiring", "baton.engine.engine_startup")
    assert engine_module("auto", "cpu") == "baton.engine.engine_startup"


def test_the_table_imports_no_engine() -> None:
    code = "import sys, baton.launch.engine_table; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
