"""Context of each part of the kit, and the commands of Baton that it can run."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.findings import CannotRun, Findings

MARGIN_S = 5.0
"""Time before the end of a part by which all that it started has ended, seconds."""


@dataclass(frozen=True)
class Kit:
    """State of one run of one part: its device, its folder and its findings."""

    device: str
    """"cpu" or "cuda:N"."""
    folder: Path
    """Folder for models and logs that the kit makes."""
    findings: Findings

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def command(
        self, *words: str, most_s: float, environ: Mapping[str, str] | None = None, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """`python WORDS`, from where the kit was started, with `given` as its input. Raises CannotRun where
        the part's time ends first, AssertionError where the command does not end by itself in `most_s`."""
        left_s = self.findings.left_s - MARGIN_S
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        try:
            return subprocess.run(
                [sys.executable, *words],
                env={**clean, "NO_COLOR": "1", "COLUMNS": "200", **(environ or {})},
                input=given,
                capture_output=True,
                text=True,
                timeout=max(1.0, min(most_s, left_s)),
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            wrote = late.stderr or b""
            said = (wrote.decode(errors="replace") if isinstance(wrote, bytes) else wrote)[-500:]
            if left_s < most_s:
                raise CannotRun(f"this part's time ended after {late.timeout:.0f} s of it") from late
            raise AssertionError(f"it has not ended after {late.timeout:.0f} s: {said}") from late

    def answer(
        self, module: str, question: Mapping[str, Any], most_s: float, environ: Mapping[str, str]
    ) -> Any:
        """Run `python -m MODULE FILE` with `question` as its input, and return what it writes to the file.

        Both are JSON. Raises AssertionError with its last line.
        """
        file = self.folder / f"{module.rpartition('.')[2]}.json"
        file.unlink(missing_ok=True)
        ran = self.command(
            *("-m", module, str(file)), most_s=most_s, environ=environ, given=json.dumps(question)
        )
        sys.stderr.write(ran.stderr)
        assert ran.returncode == 0, f"{module}: {last_line(ran.stderr or ran.stdout)}"
        return json.loads(file.read_text())

    def bench(self, *words: str, most_s: float) -> dict[str, Any]:
        """Run `python -m bench WORDS` and return its object. Raises AssertionError with its last line."""
        ran = self.command("-m", "bench", *words, most_s=most_s)
        assert ran.returncode == 0, last_line(ran.stderr or ran.stdout)
        body: dict[str, Any] = json.loads(ran.stdout)
        return body


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
