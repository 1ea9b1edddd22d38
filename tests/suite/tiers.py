"""Tiers of tests: what `make test` runs (quick), what `make test-rest` runs (rest), and everything (all).

A test that starts something slow has one of the marks in REASONS, which moves it to the rest. A test that
starts such a thing without its mark fails.
"""

import os
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, Final

import pytest

REASONS: Final = {
    "stack": "starts services by their command lines, or a worker's processes with a model over NIXL",
    "browser": "drives a browser",
    "emulated": "compiles a kernel for another CPU, or with a fault: only `make verify-kernels` has it",
    "bench": "runs a benchmark",
    "sweep": "builds models of many types that the model library knows",
    "search": "searches many states, or for faults that were put into the product",
    "prometheus": "needs the programs of Prometheus",
}
"""The marks, and what a test with each of them does."""
FOLDERS: Final = {"tests/process/": ("stack",), "tests/ui/": ("stack", "browser")}
"""Folders whose tests all have these marks."""
QUICK, REST, ALL = "quick", "rest", "all"
PARTS: Final = (QUICK, REST)
COLLECTED: Final = pytest.StashKey[list[pytest.Item]]()
"""Every test that a run collected, of whatever tier."""
SERVICES: Final = frozenset({"serve", "bootstrap", "prefill", "decode"})

_marks: frozenset[str] | None = None
"""Marks of the test that runs in this process. None while no test runs."""
_ends: ContextVar[bool] = ContextVar("ends", default=False)


def part_of(marks: Iterable[str]) -> str:
    """Return the tier of a test with these marks."""
    return QUICK if REASONS.keys().isdisjoint(marks) else REST


def marks_of(item: pytest.Item) -> frozenset[str]:
    return frozenset(mark.name for mark in item.iter_markers())


def starts(reason: str) -> None:
    """Fail the running test unless it has the mark `reason`. Called before something slow is started."""
    if _marks is not None and reason not in _marks:
        pytest.fail(
            f"`make test` has this test, and it {REASONS[reason]}: mark it with @pytest.mark.{reason}, which "
            "moves it to `make test-rest`, or test the same without that",
        )


@contextmanager
def running(marks: frozenset[str] | None) -> Iterator[None]:
    """Run a test with these marks in this process."""
    global _marks
    before, _marks = _marks, marks
    try:
        yield
    finally:
        _marks = before


@contextmanager
def ends_by_itself() -> Iterator[None]:
    """Start commands that answer and end: they are no stacks."""
    token = _ends.set(True)
    try:
        yield
    finally:
        _ends.reset(token)


def _is_service(words: list[str]) -> bool:
    """Return whether this is the command line of `baton serve` or of one of its services."""
    return "--help" not in words and any(
        following in SERVICES and ("baton.cli.main" in word or word.rpartition("/")[2] == "baton")
        for word, following in pairwise(words)
    )


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Check the command line of each process that a test starts."""
    if event != "subprocess.Popen" or _marks is None:
        return
    words = [os.fsdecode(word) for word in arguments[1]]
    if not _ends.get() and _is_service(words):
        starts("stack")
    if any("/playwright/driver/" in word for word in words[:1]):
        starts("browser")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=(*PARTS, ALL), default=ALL, help="quick: `make test`; rest: `make test-rest`"
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, does in REASONS.items():
        config.addinivalue_line("markers", f"{name}: {does}; not in `make test`")
    sys.addaudithook(_audit)


def pytest_itemcollected(item: pytest.Item) -> None:
    for folder, marks in FOLDERS.items():
        if item.nodeid.startswith(folder):
            for mark in marks:
                item.add_marker(mark)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other tier."""
    config.stash[COLLECTED] = [*items]
    tier = config.getoption("--tier")
    items[:] = [item for item in items if tier in (ALL, part_of(marks_of(item)))]
    chosen = set(items)
    if left_out := [item for item in config.stash[COLLECTED] if item not in chosen]:
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with running(marks_of(item)):
        return (yield)
