"""The plug-in of the test suite: which tests a run has, in which order, and what each may start.

make test-all ARGS=--record-durations     writes `tests/durations.json` anew
"""

import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.suite.marks import (
    ALL,
    FOLDERS,
    NOT_IN_A_TIER,
    PARTS,
    REASONS,
    marks_of,
    marks_of_command,
    part_of,
    running,
    starts,
)
from tests.support.shared import FAILED

RECORD: Final = Path(__file__).parents[1] / "durations.json"
"""File with the seconds that each test file took."""
TOGETHER: Final = (
    "tests/process/one_pair/",
    "tests/process/one_stack/",
    "tests/process/patient_pair/",
    "tests/ui/",
)
"""Folders whose tests share something that takes long to start. One process runs all tests of each."""
COLLECTED: Final = pytest.StashKey[list[pytest.Item]]()
"""Every test that a run collected, of whatever tier."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=(*PARTS, ALL), default=ALL, help="quick: `make test`; rest: `make test-rest`"
    )
    parser.addoption(
        "--engine", choices=("torch", "vllm"), default="torch", help="which one the conformance suite runs on"
    )
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json anew")
    parser.addoption(
        "--rewrite", action="store_true", help="write golden stories and diagrams anew, for review"
    )
    for name, word in (
        ("all-groups", "verify-groups"),
        ("all-models", "verify-models"),
        ("emulated", "verify-kernels"),
        ("vllm", "test-vllm"),
    ):
        parser.addoption(f"--{name}", action="store_true", help=f"also the tests of `make {word}`")


def pytest_configure(config: pytest.Config) -> None:
    for name, does in REASONS.items():
        config.addinivalue_line("markers", f"{name}: {does}; not in `make test`")
    if config.getoption("--record-durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Recorder(), "durations")
    sys.addaudithook(_check_command_line)


def _check_command_line(event: str, arguments: tuple[Any, ...]) -> None:
    """Check the command line of each process that a test starts."""
    if event == "subprocess.Popen":
        for mark in marks_of_command([os.fsdecode(word) for word in arguments[1]]):
            starts(mark)


def pytest_itemcollected(item: pytest.Item) -> None:
    for folder, marks in FOLDERS.items():
        if item.nodeid.startswith(folder):
            for mark in marks:
                item.add_marker(mark)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, and so count in the summary, the tests that this run is not to have, and sort the others."""
    config.stash[COLLECTED] = [*items]
    tier = config.getoption("--tier")
    excluded = {mark for mark in NOT_IN_A_TIER if not config.getoption(f"--{mark.replace('_', '-')}")}
    if any("gpu" in marks_of(item) for item in items) and not _has_gpu():
        excluded.add("gpu")
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        marks = marks_of(item)
        is_chosen = tier in (ALL, part_of(marks)) and excluded.isdisjoint(marks)
        (chosen if is_chosen else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
    items[:] = _longest_first(chosen) if "PYTEST_XDIST_WORKER" in os.environ else chosen


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with running(marks_of(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Mark a test of which a phase failed, for `Shared`."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


def unit_of(nodeid: str) -> str:
    """Return what one process runs as a whole: the test's file, or its folder."""
    file = nodeid.split("::", 1)[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def _longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sort tests by the recorded time of their unit. A file that is not recorded comes first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for file, each in json.loads(RECORD.read_text())["files"].items():
        seconds[unit_of(file)] += each
    return sorted(items, key=lambda item: -(seconds.get(unit_of(item.nodeid)) or math.inf))


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
