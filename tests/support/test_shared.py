"""Tests that a failed test hands nothing on to the next."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.forks import ROOT
from tests.support.shared import FAILED, STARTS_MAX, Shared

SUITE = """
from collections.abc import Iterator
from contextlib import contextmanager
import pytest
from tests.support.shared import Shared

@contextmanager
def made():
    yield []

@pytest.fixture(scope="module")
def lists():
    with Shared(made) as shared:
        yield shared

@pytest.fixture
def numbers(lists, request):
    return lists.lend(request.node)

@pytest.fixture
def whole(numbers):
    yield numbers
    assert numbers != [1, 2]

def test_first(numbers):
    numbers.append(1)

def test_that_breaks_it_in_its_teardown(whole):
    assert whole == [1]
    whole.append(2)

def test_that_gets_another_and_breaks_it(numbers):
    assert numbers == []
    numbers.append(3)
    assert not numbers

def test_that_gets_another_again(numbers):
    assert numbers == []
"""


def test_a_test_that_failed_in_any_phase_hands_nothing_on(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.suite.plugin", "-p", "no:cacheprovider"]
    said = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "1 failed, 3 passed, 1 error" in said, said


def test_what_does_not_come_up_is_not_started_for_every_test() -> None:
    starts: list[int] = []

    @contextmanager
    def never() -> Iterator[None]:
        starts.append(1)
        raise AssertionError("not ready")
        yield

    shared = Shared(never)
    for _ in range(5):
        borrower: Any = SimpleNamespace(stash=pytest.Stash())
        with pytest.raises(AssertionError, match="not ready"):
            shared.lend(borrower)
        borrower.stash[FAILED] = True
    assert len(starts) == STARTS_MAX
