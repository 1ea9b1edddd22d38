"""The GPU kit: checks and measurements of Baton on this machine's GPU.

All of it in one command: vLLM's engine first, where it is installed, then torch's. It takes nine minutes at
most, and eleven more with vLLM.

    python -m tests.gpu --device cuda --out results

Each part is a process of its own with a time of its own, the most telling first; one that cannot run says
why, and the next one goes on. Prints one table and writes `gpu-NAME.json` and `gpu-NAME.md`. The exit status
is 1 where anything that ran was wrong, 2 where there is no such device. With `--device cpu` it is smaller,
and a test of the kit.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final

from tests.gpu import findings
from tests.gpu.findings import Finding, FindingVerdict
from tests.gpu.machine import MACHINE, name_of
from tests.gpu.report import Report

PARTS: Final = {
    "machine": 60.0,
    "vllm-engine": 400.0,
    "vllm-speed": 260.0,
    "memory": 110.0,
    "engine": 120.0,
    "stack": 90.0,
    "speed": 200.0,
    "checks": 90.0,
}
"""Parts of the kit, with the longest time that each may take, seconds."""
BUDGET_S: Final = 1200.0
GRACE_S: Final = 10.0
"""Time for a part of the kit to end by itself after its budget, seconds."""
WORTH_S: Final = 5.0
"""Least time that is left for a part to be started, seconds."""
NO_DEVICE: Final = 2


def main(arguments: list[str]) -> int:
    started = monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="this part (more than one)")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="all of it together, in seconds")
    parser.add_argument("--out", type=Path, default=Path("build", "gpu"), help="where its files go")
    parser.add_argument("--name", default="", help="of its files: the device's, if not given")
    given = parser.parse_args(arguments)
    device = f"{given.device}:0" if given.device == "cuda" else given.device
    end = started + given.budget_s
    found: list[Finding] = []
    logs = given.out.resolve() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
        for name, most_s in PARTS.items():
            if given.only and name not in given.only and name != "machine":
                continue
            seconds = min(most_s, end - monotonic() - GRACE_S)
            if seconds < WORTH_S:
                why = f"no time is left of {given.budget_s:g} s"
                found.append(Finding(name, "this part", FindingVerdict.NOT_RUN, why))
                continue
            place = Path(folder, name)
            place.mkdir()
            told = run(name, device, place, seconds, logs / f"{name}.log")
            for each in told:
                sys.stderr.write(f"{each.part}: {each.verdict.value}: {each.what} {each.detail}"[:200] + "\n")
            found += told
            if name == "machine" and not _known(found):
                break
    machine = next((each.figures for each in found if each.what == MACHINE), {})
    report = Report(given.name or _named(machine, device), device, machine, monotonic() - started, found)
    paths = report.write(given.out)
    sys.stdout.write("\n".join([report.table(), *map(str, paths), ""]))
    if report.wrong:
        return 1
    return 0 if _known(found) else NO_DEVICE


def _known(found: Sequence[Finding]) -> bool:
    """The device is there, and can be asked."""
    return any(each.what == MACHINE and each.verdict is FindingVerdict.MEASURED for each in found)


def _named(machine: dict[str, object], device: str) -> str:
    return name_of({"device": device, **machine})


def run(name: str, device: str, folder: Path, seconds: float, log: Path) -> list[Finding]:
    """Run a part and return its findings, and how it ended if that was an error."""
    file = folder / "findings.jsonl"
    words = (
        "--device",
        device,
        "--folder",
        str(folder),
        "--findings",
        str(file),
        "--seconds",
        f"{seconds:.1f}",
    )
    started = monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.part", name, *words],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found, begun = findings.read(file)
    if code == 0:
        return found
    how = f"did not end in {seconds + GRACE_S:.0f} s" if code is None else f"ended with exit code {code}"
    lines = log.read_text(errors="replace").strip().splitlines()
    why = f"the part {how}; its log, {log}, ends: {lines[-1] if lines else 'empty'}"
    return [
        *found,
        Finding(
            name, begun or "this part", FindingVerdict.WRONG, why, seconds=round(monotonic() - started, 1)
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
