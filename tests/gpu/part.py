"""Process of one part of the kit, which may be killed.

python -m tests.gpu.part NAME --device cuda:0 --folder DIRECTORY --findings FILE --seconds 60
"""

import argparse
import importlib
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

from baton.engine.loading.library_loading import check_library_version
from baton.launch.engine_table import choose_engine
from baton.runtime.errors import StartupError
from baton.runtime.logging import configure
from baton.runtime.model_options import EngineName
from tests.gpu.findings import CannotRun, Finding, Findings
from tests.gpu.kit import Kit

ENGINES: Final = {
    "vllm-engine": EngineName.VLLM,
    "vllm-speed": EngineName.VLLM,
    "engine": EngineName.TORCH,
    "stack": EngineName.TORCH,
    "speed": EngineName.TORCH,
    "checks": EngineName.TORCH,
}
"""Engines that parts of the kit are about."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.part")
    parser.add_argument("name")
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--findings", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args(arguments)
    configure("info", "text")
    findings = Findings(given.name, given.findings, monotonic() + given.seconds)
    try:
        _check_engine(ENGINES.get(given.name))
    except StartupError as error:
        findings.note("this part", partial(_cannot_run, str(error)))
        return 0
    module = importlib.import_module(f"tests.gpu.{given.name.replace('-', '_')}")
    module.run(Kit(given.device, given.folder, findings))
    return 0


def _check_engine(engine: EngineName | None) -> None:
    """Raise StartupError if the engine that a part is about is not installed."""
    if engine is not None:
        choose_engine(engine.value, "auto")
    if engine is EngineName.TORCH:
        check_library_version()


def _cannot_run(why: str, _: Finding) -> None:
    raise CannotRun(why)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
