"""Order in which test files are shared out to processes: the longest first, by `tests/durations.json`.

make test-all ARGS=--record-durations     write that file anew
"""

import json
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling

RECORD: Final = Path(__file__).parents[1] / "durations.json"
TOGETHER: Final = (
    "tests/process/one_pair/",
    "tests/process/one_stack/",
    "tests/process/patient_pair/",
    "tests/ui/",
)
"""Folders whose tests share something that takes long to start. One process runs all tests of each."""


def unit_of(nodeid: str) -> str:
    """Return what is handed out at once: the test's file, or its folder."""
    file = nodeid.split("::", 1)[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


class _ByUnit(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Hand units out in the order of collection, with `--dist loadfile`."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return _ByUnit(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of an xdist process. A file that is not recorded comes first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        seconds: defaultdict[str, float] = defaultdict(float)
        for file, each in json.loads(RECORD.read_text())["files"].items():
            seconds[unit_of(file)] += each
        items.sort(key=lambda item: -(seconds.get(unit_of(item.nodeid)) or math.inf))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json anew")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Recorder(), "durations")


class _Recorder:
    """Seconds by file: set-up, call and tear-down of all its tests."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.split("::", 1)[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest_first = sorted(self._seconds.items(), key=lambda each: -each[1])
        files = {file: round(seconds, 2) for file, seconds in longest_first}
        RECORD.write_text(json.dumps({"files": files}, indent=1) + "\n")
