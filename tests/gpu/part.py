"""Process of one part of the kit, which may be killed.

In a process of its own, which may be killed.

python -m tests.gpu.part NAME --device cuda:0 --folder DIRECTORY --findings FILE --seconds 60
"""

import argparse
import importlib
import sys
from pathlib import Path
from time import monotonic

from baton.runtime.logging import configure
from tests.gpu.findings import Findings
from tests.gpu.kit import Kit


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
    importlib.import_module(f"tests.gpu.{given.name}").run(Kit(given.device, given.folder, findings))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
