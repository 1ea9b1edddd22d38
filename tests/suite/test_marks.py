"""Tests of the tiers: the Makefile's words run every test, and `make test` nothing slow."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest
from playwright._impl._driver import compute_driver_executable

from tests.suite.marks import (
    ALL,
    FOLDERS,
    NOT_IN_A_TIER,
    QUICK,
    REASONS,
    REST,
    ends_by_itself,
    marks_of,
    part_of,
    running,
    starts,
)
from tests.suite.plugin import COLLECTED, unit_of

ROOT: Final = Path(__file__).parents[2]
WORDS: Final = {QUICK: "test", REST: "test-rest", ALL: "test-all"}

BATON: Final = [sys.executable, "-m", "baton.cli.main"]
NOT_TESTED_HERE: Final = {"gpu", *NOT_IN_A_TIER}
"""Marks of tests for a GPU, or of `make verify-groups`, `verify-models`, `verify-kernels` and `test-vllm`."""


def recipe(word: str) -> str:
    """Return the commands of a word of the Makefile."""
    environ = {"PATH": os.environ["PATH"]}
    command = ["make", "-n", word]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.parametrize("tier", WORDS)
def test_each_word_runs_its_tier_and_nothing_else(tier: str) -> None:
    ran = re.findall(r"-m pytest .*", recipe(WORDS[tier]))
    assert ran == [f"-m pytest -n 2 --dist loadfile --tier {tier} "]


@pytest.mark.parametrize("broken", ["check", "test", "test-lowest", "test-rest", "test-vllm", "nothing"])
def test_continuous_integration_runs_the_checks_and_every_test_and_fails_by_each(
    broken: str, tmp_path: Path
) -> None:
    """A script's exit status is that of its last command, pytest."""
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$2 in $CI"\n[ "$2" != {broken} ]\n')
    make.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environ, capture_output=True, text=True, timeout=60)
    words = ["check", "test", "test-lowest", "test-rest", "test-vllm"]
    ran = words[: words.index(broken) + 1] if broken in words else words
    assert done.stdout.splitlines() == [f"{word} in true" for word in ran]
    assert (done.returncode != 0) is (broken in words)


def test_no_test_is_left_out_of_both_tiers(request: pytest.FixtureRequest) -> None:
    """The run has all collected tests of its tier."""
    tier = request.config.getoption("--tier")
    run = {item.nodeid for item in request.session.items}
    collected = request.config.stash[COLLECTED]
    chosen = {item.nodeid: item for item in collected if tier in (ALL, part_of(marks_of(item)))}
    assert run <= chosen.keys()
    left_out = [
        nodeid for nodeid in chosen.keys() - run if marks_of(chosen[nodeid]).isdisjoint(NOT_TESTED_HERE)
    ]
    assert left_out == []


def test_what_no_word_of_these_runs_is_run_by_another(request: pytest.FixtureRequest) -> None:
    """Each file with a case for `make verify-groups` or `make verify-models` is named there; the kernels of
    `make verify-kernels` are the engine's. `make test-vllm` has all models on vLLM, by a flag."""
    named = {
        "all_groups": re.findall(r"tests/\S+\.py", recipe("verify-groups")),
        "all_models": [*re.findall(r"tests/\S+\.py", recipe("verify-models")), "tests/vllm/test_*.py"],
        "emulated": ["tests/engine/*test_*.py"],
    }
    for item in request.config.stash[COLLECTED]:
        for mark in named.keys() & marks_of(item):
            file = item.nodeid.split("::")[0]
            assert any(fnmatch(file, each) for each in named[mark]), (mark, file)


def test_a_test_of_such_a_folder_has_its_marks(request: pytest.FixtureRequest) -> None:
    for item in request.config.stash[COLLECTED]:
        for folder, marks in FOLDERS.items():
            assert not item.nodeid.startswith(folder) or marks_of(item) >= set(marks)


@pytest.mark.parametrize("reason", REASONS)
def test_what_starts_something_slow_fails_a_test_that_does_not_say_so(reason: str) -> None:
    others = frozenset(REASONS.keys() - {reason})
    with running(others), pytest.raises(pytest.fail.Exception, match=f"mark it with @pytest.mark.{reason}"):
        starts(reason)
    with running(frozenset({reason})):
        starts(reason)
    with running(None):  # no test at all: `make verify`
        starts(reason)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([*BATON, "serve", "--port", "0"], "stack"),
        ([*BATON, "bootstrap"], "stack"),
        (["ip", "netns", "exec", "there", *BATON, "prefill", "--name", "prefill-0"], "stack"),
        ([sys.executable, "-c", "from baton.cli.main import main; main()", "decode"], "stack"),
        ([".venv/bin/baton", "serve"], "stack"),
        ([str(compute_driver_executable()[0]), "cli.js", "run-driver"], "browser"),
    ],
    ids=lambda given: given if isinstance(given, str) else given[-1],
)
def test_no_process_is_started_whose_command_line_says_what_the_test_does_not(
    words: Sequence[str], reason: str
) -> None:
    """This test itself has no mark."""
    with pytest.raises(pytest.fail.Exception, match=f"mark it with @pytest.mark.{reason}"):
        subprocess.run(words, timeout=60, check=False)


@pytest.mark.parametrize("words", [["serve", "--help"], ["bench", "serve", "--help"], ["version"]])
def test_a_command_that_answers_and_ends_is_no_stack(words: Sequence[str]) -> None:
    done = subprocess.run([*BATON, *words], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0


def test_a_command_line_that_is_refused_can_be_tried() -> None:
    with ends_by_itself():
        done = subprocess.run([*BATON, "serve", "--no-flag"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2


def test_a_test_is_in_the_quick_part_unless_a_mark_says_why_not() -> None:
    assert part_of({"parametrize", "timeout", "asyncio"}) == QUICK
    assert [part_of({"timeout", reason}) for reason in REASONS] == [REST] * len(REASONS)


def test_what_one_process_runs_is_a_file_or_a_folder_that_shares_a_stack() -> None:
    assert unit_of("tests/launch/test_fork_server.py::test_x[a::b]") == "tests/launch/test_fork_server.py"
    assert unit_of("tests/process/one_stack/test_load.py::test_x") == "tests/process/one_stack/"
