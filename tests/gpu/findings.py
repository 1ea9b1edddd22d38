"""Findings of a part, kept even if the part is killed.

They are lines of JSON, each written as soon as it is known. The last begun finding shows where a part hung.
"""

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import Any


class FindingVerdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    MEASURED = "measured"
    NOT_RUN = "not run"


class CannotRun(Exception):
    """Raised when something that is needed is missing here, which is no fault of Baton's. The text names
    it."""


@dataclass
class Finding:
    part: str
    what: str
    """A claim, or what was measured."""
    verdict: FindingVerdict
    detail: str = ""
    """Why, in one line, or what was seen."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Measured values. Their names end with the unit."""
    seconds: float = 0.0


class Findings:
    """Findings of one part, in a file."""

    def __init__(self, part: str, file: Path, until: float) -> None:
        """`until`: when the part has to be done, by this system's monotonic clock."""
        self.part = part
        self._file = file
        self._until = until

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - monotonic())

    def note(self, what: str, look: Callable[[Finding], None], takes_s: float = 1.0) -> Finding:
        """Record what `look` finds. It is right unless an error says otherwise, and measured if it got
        figures. It is skipped if less than `takes_s` is left."""
        found = Finding(self.part, what, FindingVerdict.RIGHT)
        started = monotonic()
        self._write({"begun": what})
        try:
            self._check_time(takes_s)
            look(found)
        except CannotRun as why:
            found.verdict, found.detail = FindingVerdict.NOT_RUN, str(why)
        except Exception as error:  # whatever goes wrong, the next one goes on
            found.verdict = FindingVerdict.WRONG
            found.detail = f"{type(error).__name__}: {error}".strip()
            traceback.print_exc()
        else:
            if found.figures:
                found.verdict = FindingVerdict.MEASURED
        found.seconds = round(monotonic() - started, 1)
        self._write(asdict(found))
        return found

    def _check_time(self, takes_s: float) -> None:
        if self.left_s < takes_s:
            raise CannotRun(f"{self.left_s:.0f} s are left of this part's time, and it takes {takes_s:g}")

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(file: Path) -> tuple[list[Finding], str]:
    """Return the findings, and the finding that was begun last and not ended; empty if there is none."""
    found: list[Finding] = []
    begun = ""
    for line in file.read_text().splitlines() if file.exists() else ():
        told = json.loads(line)
        if "begun" in told:
            begun = told["begun"]
        else:
            found.append(Finding(**{**told, "verdict": FindingVerdict(told["verdict"])}))
            begun = ""
    return found, begun
