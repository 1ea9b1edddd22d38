"""Where does a run's time go? Each whole run writes it down: each folder's sum, the slowest tests, each file.

A run is whole when one of the Makefile's words was given with no choice of tests beside it. It writes
`.durations/WORD.json`; `tests/durations.json` is the record of one `make test-all`, from which the order of
the files and the folders' budgets are taken.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from tests.suite.tiers import ALL, PARTS, QUICK, REST

ROOT: Final = Path(__file__).parents[2]
WORDS: Final = {QUICK: "test", REST: "test-rest", ALL: "test-all"}
"""Of the Makefile, by the tier that each of them runs."""
SLOWEST: Final = 50

Seconds = Mapping[str, float]


def record_of(root: Path) -> Path:
    return root / "tests" / "durations.json"


def written_by(tier: str, root: Path) -> Path:
    return root / ".durations" / f"{WORDS[tier]}.json"


def folder_of(name: str) -> str:
    """`tests/FOLDER` of a test or a file, however deep in it; `tests` for a file beside the folders."""
    file = name.split("::", 1)[0].split("/")
    return "/".join(file[: min(2, len(file) - 1)])


def summed(seconds: Iterable[tuple[str, float]], of: Callable[[str], str]) -> dict[str, float]:
    """By what `of` says of each name."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, each in seconds:
        sums[of(name)] += each
    return dict(sums)


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of set-up, call and tear-down, summed over the processes that ran tests side by side."""

    files: Mapping[str, Seconds] = field(default_factory=dict)
    """By part of the tests, then by file."""

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(json.loads(path.read_text(encoding="utf-8"))["files"])

    def of(self, parts: Iterable[str], of: Callable[[str], str]) -> dict[str, float]:
        """Of these parts, summed by what `of` says of each file."""
        return summed([each for part in parts for each in self.files.get(part, {}).items()], of)

    def folders(self, parts: Iterable[str] = PARTS) -> dict[str, float]:
        return self.of(parts, folder_of)

    def told(self) -> dict[str, Any]:
        """As it is written: the folders for people, since the files say the same."""
        written = Durations(_rounded(self.files))
        folders = {part: written.folders([part]) for part in written.files}
        return {"folders": _rounded(folders), "files": written.files}


def _rounded(parts: Mapping[str, Seconds]) -> dict[str, dict[str, float]]:
    """Each part's longest first."""
    return {
        part: {name: round(each, 2) for name, each in sorted(seconds.items(), key=lambda one: -one[1])}
        for part, seconds in parts.items()
    }


@dataclass(slots=True)
class Stopwatch:
    """What a run comes to, while its tests report."""

    reports: list[tuple[str, str, float]] = field(default_factory=list)
    """Part, test and seconds, of each test's set-up, call and tear-down."""
    started_s: float = field(default_factory=time.monotonic)

    def add(self, part: str, nodeid: str, seconds: float) -> None:
        self.reports.append((part, nodeid, seconds))

    def durations(self) -> Durations:
        def of_part(part: str) -> Seconds:
            return summed([(test, each) for where, test, each in self.reports if where == part], _file_of)

        return Durations({part: of_part(part) for part in {part: None for part, *_ in self.reports}})

    def told(self, tier: str) -> dict[str, Any]:
        tests = summed([(test, each) for _, test, each in self.reports], str)
        slowest = sorted(tests.items(), key=lambda one: -one[1])[:SLOWEST]
        return {
            "word": f"make {WORDS[tier]}",
            "cores": len(os.sched_getaffinity(0)),
            "tests": len(tests),
            "wall_s": round(time.monotonic() - self.started_s, 1),
            "slowest": {test: round(seconds, 2) for test, seconds in slowest},
            **self.durations().told(),
        }


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def write(path: Path, told: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
