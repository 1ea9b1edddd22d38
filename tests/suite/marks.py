"""Marks of slow tests, which divide the suite into two tiers: quick and rest, for `make test-rest`.

A test that starts something slow has one of the marks in REASONS, which moves it to the rest. A test that
starts such a thing without its mark fails.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Final

import pytest

REASONS: Final = {
    "stack": "starts services by their command lines, or a worker's processes with a model over NIXL",
    "browser": "drives a browser",
    "emulated": "compiles a kernel for another CPU, or with a fault: only `make verify-kernels` has it",
    "vllm": "needs vLLM, which has an environment of its own: only `make test-vllm` has it",
    "bench": "runs a benchmark",
    "sweep": "builds models of many types that the model library knows",
    "search": "searches many states, or for faults that were put into the product",
    "prometheus": "needs the programs of Prometheus",
}
"""The marks, and what a test with each of them does."""
FOLDERS: Final = {
    "tests/process/": ("stack",),
    "tests/ui/": ("stack", "browser"),
    "tests/vllm/": ("stack", "vllm"),
}
"""Folders whose tests all have these marks."""
QUICK, REST, ALL = "quick", "rest", "all"
PARTS: Final = (QUICK, REST)
NOT_IN_A_TIER: Final = ("emulated", "all_groups", "all_models", "vllm")
"""Marks of tests that run only if the option of the same name is given."""
SERVICES: Final = frozenset({"serve", "bootstrap", "prefill", "decode"})
"""Words of the command line that start services."""

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


def marks_of_command(words: list[str]) -> Iterator[str]:
    """Yield the marks of a test that starts a process with this command line."""
    if not _ends.get() and _is_service(words):
        yield "stack"
    if any("/playwright/driver/" in word for word in words[:1]):
        yield "browser"


def _is_service(words: list[str]) -> bool:
    """Return whether this is the command line of `baton serve` or of one of its services."""
    return "--help" not in words and any(
        following in SERVICES and ("baton.cli.main" in word or word.rpartition("/")[2] == "baton")
        for word, following in pairwise(words)
    )
