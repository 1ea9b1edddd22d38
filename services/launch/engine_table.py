"""Table of the engines that a worker can use, by name. Each is imported when it is chosen."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from baton.launch.gpus import Gpus, find_gpus
from baton.models.engine_features import MissingFeatures, missing_in_torch, missing_in_vllm
from baton.runtime.errors import StartupError
from baton.runtime.model_options import EngineName


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine in the table of engines: its module, the package that it needs, and how to install that."""

    module: str
    """Module with the function `start_rank`, an `EngineLoader`. It may also have `start_both`, an
    `EnginePairLoader`."""
    package: str
    """Python package that the engine needs, and that may be missing."""
    install: str
    """Distribution to install if the package is missing, for the error."""
    missing: MissingFeatures
    """Features of models that the engine lacks."""
    preloading: str = ""
    """Module that imports all that the engine needs, for a process that workers are forked from. Empty if
    `module` does."""
    records_graphs: bool = False
    """Whether it records graphs on a GPU, which contain the addresses of one side's pages."""


ENGINES: Final[Mapping[EngineName, EngineEntry]] = {
    EngineName.TORCH: EngineEntry(
        "baton.engine.engine_startup", "torch", "baton-serve, with its packages", missing_in_torch
    ),
    EngineName.VLLM: EngineEntry(
        "baton.vllm.engine_startup",
        "vllm",
        "baton-serve[vllm]",
        missing_in_vllm,
        preloading="baton.vllm.preloading",
        records_graphs=True,
    ),
}


def is_installed(package: str) -> bool:
    """Return whether a Python package could be imported here, without importing it."""
    return find_spec(package) is not None


def choose_engine(
    name: str,
    device: str,
    environ: Mapping[str, str] = os.environ,
    installed: Callable[[str], bool] = is_installed,
    gpus: Callable[[Mapping[str, str]], Gpus] = find_gpus,
) -> EngineName:
    """Return the engine that the value `name` of `--engine` stands for. `device`: value of `--device`.

    "auto" stands for vLLM if it is installed and there is a GPU, else for torch. Raises StartupError if the
    engine's package is not installed.
    """
    engine = EngineName(name)
    if engine is EngineName.AUTO:
        # GPUs are looked for last, because that runs a program of the driver.
        vllm = device != "cpu" and installed(ENGINES[EngineName.VLLM].package) and bool(gpus(environ))
        return EngineName.VLLM if vllm else EngineName.TORCH
    entry = ENGINES[engine]
    if not installed(entry.package):
        raise StartupError(
            f"--engine {name}: the package {entry.package} is not installed in this environment; install "
            f"{entry.install}"
        )
    return engine


def engine_module(name: str, device: str) -> str:
    """Return the module that imports the engine that `--engine` names, for a process that preloads it.

    If that engine is not installed, return torch's. The worker that needs the missing one reports the error.
    """
    try:
        entry = ENGINES[choose_engine(name, device)]
    except StartupError:
        entry = ENGINES[EngineName.TORCH]
    return entry.preloading or entry.module


def can_serve_both(
    engine: EngineName,
    device: str,
    environ: Mapping[str, str] = os.environ,
    gpus: Callable[[Mapping[str, str]], Gpus] = find_gpus,
) -> bool:
    """Return whether one process can serve both sides with `engine` on `device`, the value of `--device`."""
    return not ENGINES[engine].records_graphs or device == "cpu" or not gpus(environ)


def load_starter(name: str, device: str, function: str) -> Callable[..., Any]:
    """Import the engine that `--engine` names, and return its `function`: "start_rank" or "start_both".

    It takes seconds. Raises StartupError if the engine is not installed, or cannot serve both sides here.
    """
    engine = choose_engine(name, device)
    can_start = function != "start_both" or can_serve_both(engine, device)
    starter = getattr(import_module(ENGINES[engine].module), function, None) if can_start else None
    if starter is None:
        raise StartupError(
            f"--engine {engine.value}: it does not serve both sides in one process on {device}; start a "
            "prefill and a decode worker"
        )
    return starter  # type: ignore[no-any-return]
