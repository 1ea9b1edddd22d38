"""Does a whole run write down where its time went, and fail by a folder beyond its budget?

In runs of pytest over a tree of a few files, with the suite's own plugins. What each test takes is made up.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.suite.durations import ROOT, Durations, folder_of, record_of, written_by
from tests.suite.order import unit_of
from tests.suite.tiers import ALL, QUICK, REST

FILES: Final = {
    "tests/one/test_a.py": "def test_1(): pass\ndef test_2(): pass\n",
    "tests/one/deep/test_b.py": "import pytest\n@pytest.mark.stack\ndef test_3(): pass\ndef test_4(): pass\n",
    "tests/two/test_c.py": "import pytest\n@pytest.mark.search\ndef test_5(): pass\n",
    "tests/two/test_d.py": "def test_6(): pass\n",
    "tests/conftest.py": """
import pytest
pytest_plugins = ["tests.suite.tiers", "tests.suite.order", "tests.suite.timing"]

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    report.duration = {"setup": 1.0, "call": 10.0 * int(item.name[-1]), "teardown": 0.5}[report.when]
    return report
""",
}
TOOK: Final = {
    QUICK: {"tests/one/test_a.py": 33.0, "tests/one/deep/test_b.py": 41.5, "tests/two/test_d.py": 61.5},
    REST: {"tests/one/deep/test_b.py": 31.5, "tests/two/test_c.py": 51.5},
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\naddopts = --strict-markers\n")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    recorded(tmp_path, TOOK)
    return tmp_path


def recorded(tree: Path, files: Mapping[str, Mapping[str, float]]) -> None:
    record_of(tree).write_text(json.dumps(Durations(files).told()))


def run(tree: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: each for name, each in os.environ.items() if not name.startswith(("CI", "PYTEST"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio", *words],
        cwd=tree,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def wrote(tree: Path, tier: str) -> Any:
    return json.loads(written_by(tier, tree).read_text())


def test_a_whole_run_writes_its_slowest_tests_and_each_folders_sum(tree: Path) -> None:
    done = run(tree, "--tier", ALL, "-n", "2", "--dist", "loadfile")
    assert done.returncode == 0, done.stdout
    told = wrote(tree, ALL)
    assert told["files"] == TOOK
    assert told["folders"] == {
        QUICK: {"tests/one": 74.5, "tests/two": 61.5},
        REST: {"tests/two": 51.5, "tests/one": 31.5},
    }
    assert next(iter(told["slowest"].items())) == ("tests/two/test_d.py::test_6", 61.5)
    assert (told["word"], told["tests"], len(told["slowest"])) == ("make test-all", 6, 6)
    assert done.stdout.splitlines()[-1].strip("= ").startswith("6 passed in")


@pytest.mark.parametrize(("tier", "passed", "left_out"), [(QUICK, 4, 2), (REST, 2, 4)])
def test_a_run_of_one_part_counts_what_it_leaves_out_and_writes_its_own_file(
    tree: Path, tier: str, passed: int, left_out: int
) -> None:
    done = run(tree, "--tier", tier)
    assert f"{passed} passed, {left_out} deselected" in done.stdout.splitlines()[-1]
    assert wrote(tree, tier)["files"] == {tier: TOOK[tier]}
    assert not written_by(ALL, tree).exists()


@pytest.mark.parametrize(
    "words",
    [["--tier", ALL, "-k", "test_1"], ["--tier", ALL, "tests/one"], ["--tier", ALL, "-m", "stack"], []],
)
def test_a_run_of_chosen_tests_writes_nothing_and_is_not_judged(tree: Path, words: list[str]) -> None:
    recorded(tree, {})
    done = run(tree, *(["--tier", ALL] if words else []), *words)
    assert done.returncode == 0, done.stdout
    assert not (tree / ".durations").exists()


GREW: Final = {QUICK: TOOK[QUICK] | {"tests/two/test_d.py": 31.5}, REST: TOOK[REST]}
"""A record, beside which the second folder has grown."""
SAYS: Final = r"tests/two took 113.0 s, and its budget of 83.0 s is 83.0 s at the pace of this run \(1.00\)"


@pytest.mark.parametrize("processes", [[], ["-n", "2", "--dist", "loadfile"]], ids=["one", "two"])
def test_a_whole_run_fails_by_a_folder_that_grew_and_names_it(tree: Path, processes: list[str]) -> None:
    recorded(tree, GREW)
    done = run(tree, "--tier", ALL, *processes)
    assert done.returncode == 1
    assert re.search(SAYS, done.stdout)
    assert "FAILED tests/durations.json::tests/two" in done.stdout
    assert "1 failed, 6 passed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("words", [["--tier", ALL], ["--tier", QUICK]], ids=["ci", "quick"])
def test_where_machines_are_shared_and_in_the_quick_run_the_same_is_said_and_nothing_fails(
    tree: Path, words: list[str]
) -> None:
    recorded(tree, GREW)
    done = run(tree, *words, **({"CI": "true"} if ALL in words else {}))
    assert done.returncode == 0
    assert re.search("OVER BUDGET tests/two took", done.stdout)
    assert re.match(r"=+ \d passed", done.stdout.splitlines()[-1])


def test_a_run_with_a_failure_is_not_judged(tree: Path) -> None:
    recorded(tree, GREW)
    (tree / "tests/one/test_a.py").write_text("def test_1(): assert False\n")
    done = run(tree, "--tier", ALL)
    assert done.returncode == 1
    assert "tests/two took" not in done.stdout
    assert "Budgets are not judged" in done.stdout


def test_the_longest_are_handed_out_first_and_what_is_not_recorded_before_them(tree: Path) -> None:
    order = {name: seconds for name, seconds in TOOK[QUICK].items() if "test_a" not in name}
    recorded(tree, {QUICK: order, REST: TOOK[REST]})
    done = run(tree, "--tier", ALL, "-n", "1", "--dist", "loadfile", "-v")
    ran = list(dict.fromkeys(re.findall(r"PASSED (tests/\S+\.py)", done.stdout)))
    assert [Path(name).stem for name in ran] == ["test_a", "test_b", "test_d", "test_c"]


def test_what_is_handed_out_at_once_is_a_file_or_a_folder_that_shares_a_stack() -> None:
    assert unit_of("tests/cli/test_forks.py::test_x[a::b]") == "tests/cli/test_forks.py"
    assert unit_of("tests/process/one_stack/test_load.py::test_x") == "tests/process/one_stack/"
    assert folder_of("tests/process/one_stack/test_load.py::test_x") == "tests/process"
    assert folder_of("tests/test_alone.py::test_x") == "tests"
