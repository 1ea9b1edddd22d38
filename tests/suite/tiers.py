"""Which tests does each word of the Makefile run, and what does none of `make test` start?

A test that starts something slow says so by a mark, one of `REASONS`. `make test` leaves those tests out,
`make test-rest` has them alone, and `make test-all` has everything. Who starts such a thing without its mark
fails, in every run: no test can slip into `make test`.
"""

import os
import sys
from collections.abc import Container, Generator, Iterable, Iterator
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
"""Whose tests all have these marks."""
QUICK, REST, ALL = "quick", "rest", "all"
PARTS: Final = (QUICK, REST)
COLLECTED: Final = pytest.StashKey[list[pytest.Item]]()
"""Every test that a run found, of whatever part."""
SERVICES: Final = frozenset({"serve", "bootstrap", "prefill", "decode"})

_marks: frozenset[str] | None = None
"""Of the test that runs in this process, or None where none runs."""
_ends: ContextVar[bool] = ContextVar("ends", default=False)


def part_of(marks: Iterable[str]) -> str:
    """The one part that has a test: `make test` runs the one, `make test-rest` the other."""
    return QUICK if REASONS.keys().isdisjoint(marks) else REST


def parts_of(config: pytest.Config) -> tuple[str, ...]:
    """What the run's tier is made of."""
    tier = config.getoption("--tier") or ALL
    return PARTS if tier == ALL else (tier,)


def of_parts(parts: Container[str], items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if part_of(marks_of(item)) in parts]


def marks_of(item: pytest.Item) -> frozenset[str]:
    return frozenset(mark.name for mark in item.iter_markers())


def starts(reason: str) -> None:
    """Said by whatever starts something slow, before it does. Fails a test that has not the mark `reason`."""
    if _marks is not None and reason not in _marks:
        pytest.fail(
            f"`make test` has this test, and it {REASONS[reason]}: mark it with @pytest.mark.{reason}, which "
            "moves it to `make test-rest`, or test the same without that",
        )


@contextmanager
def running(marks: frozenset[str] | None) -> Iterator[None]:
    """A test with these marks runs in this process."""
    global _marks
    before, _marks = _marks, marks
    try:
        yield
    finally:
        _marks = before


@contextmanager
def ends_by_itself() -> Iterator[None]:
    """What is started here is waited for: a command that answers and ends is no stack."""
    token = _ends.set(True)
    try:
        yield
    finally:
        _ends.reset(token)


def _is_service(words: list[str]) -> bool:
    """Whether this is the command line of `baton serve` or of one of its services."""
    for word, following in pairwise(words):
        if following in SERVICES and ("baton.cli.main" in word or word.rpartition("/")[2] == "baton"):
            return "--help" not in words
    return False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Of every process that this one starts: its command line says what it is."""
    if event != "subprocess.Popen" or _marks is None:
        return
    words = [os.fsdecode(word) for word in arguments[1]]
    if not _ends.get() and _is_service(words):
        starts("stack")
    if any("/playwright/driver/" in word for word in words[:1]):
        starts("browser")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=(*PARTS, ALL), help="`make test` is quick, `make test-rest` rest; without, all"
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, does in REASONS.items():
        config.addinivalue_line("markers", f"{name}: {does}; not in `make test`")
    sys.addaudithook(_watch)


def pytest_itemcollected(item: pytest.Item) -> None:
    for folder, marks in FOLDERS.items():
        if item.nodeid.startswith(folder):
            for mark in marks:
                item.add_marker(mark)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, and so count in the summary, what the tier has not."""
    config.stash[COLLECTED] = [*items]
    items[:] = of_parts(parts_of(config), items)
    if left_out := of_parts(set(PARTS) - set(parts_of(config)), config.stash[COLLECTED]):
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with running(marks_of(item)):
        return (yield)
