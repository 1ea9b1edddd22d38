"""Is a folder of tests told that grew by a fifth, and no other?"""

import json
from typing import Final

import pytest

from tests.suite.budgets import NOISE_S, complaints, pace, rewritten
from tests.suite.durations import ROOT, Durations, record_of
from tests.suite.tiers import QUICK, REST

BUDGETS: Final = {
    "tests/large": 600.0,
    "tests/middle": 100.0,
    "tests/other": 80.0,
    "tests/more": 40.0,
    "tests/less": 10.0,
    "tests/small": 2.0,
}


def grown(**by: float) -> dict[str, float]:
    """A run at the pace of the budgets, but for these folders."""
    return {folder: seconds * by.get(folder.rpartition("/")[2], 1.0) for folder, seconds in BUDGETS.items()}


def told(measured: dict[str, float]) -> list[str]:
    return [folder for folder, _ in complaints(measured, BUDGETS)]


def test_a_run_like_the_recorded_one_is_within_its_budgets() -> None:
    assert told(grown()) == []


@pytest.mark.parametrize("folder", ["large", "middle", "other"])
def test_a_folder_that_grew_by_a_fifth_is_told_whatever_its_share_of_the_run(folder: str) -> None:
    assert told(grown(**{folder: 1.2})) == [f"tests/{folder}"]
    assert told(grown(**{folder: 1.15})) == []


@pytest.mark.parametrize("by", [0.3, 1.5, 4.0])
def test_a_machine_that_is_slower_or_faster_throughout_is_not_told_and_growth_on_it_is(by: float) -> None:
    run = {folder: seconds * by for folder, seconds in grown().items()}
    assert told(run) == []
    run["tests/middle"] *= 1.3
    assert told(run) == ["tests/middle"]


def test_a_folder_whose_growth_is_noise_is_not_told() -> None:
    assert told(grown(small=2.0)) == []
    assert told(grown(small=1 + NOISE_S)) == ["tests/small"]


def test_two_folders_that_grew_are_told_apart_from_the_machine() -> None:
    assert told(grown(large=1.5, other=1.5)) == ["tests/large", "tests/other"]


def test_a_folder_that_became_quick_makes_no_other_one_slow() -> None:
    assert told(grown(large=0.2)) == []


def test_a_new_folder_without_a_budget_and_a_budget_without_a_folder_are_told() -> None:
    run = grown() | {"tests/new": 0.1}
    del run["tests/other"]
    assert told(run) == ["tests/new", "tests/other"]


def test_what_is_told_says_the_seconds_and_the_command_that_changes_a_budget() -> None:
    ((folder, why),) = complaints(grown(middle=1.5), BUDGETS)
    assert folder == "tests/middle"
    assert why.startswith("took 150.0 s, and its budget of 100.0 s is 100.0 s at the pace of this run (1.00)")
    assert why.endswith("python -m tests.suite.budgets --rewrite tests/middle")


def test_a_folder_is_told_that_is_most_of_the_run() -> None:
    budgets = {"tests/most": 100.0, "tests/rest": 10.0}
    run = budgets | {"tests/most": 130.0}
    assert [folder for folder, _ in complaints(run, budgets)] == ["tests/most"]


def test_where_there_is_nothing_to_compare_with_the_pace_is_that_of_the_record() -> None:
    assert pace({}, {}) == 1.0
    assert pace({"tests/one": 5.0}, {"tests/one": 1.0}, "tests/one") == 1.0


def test_one_folders_budget_is_rewritten_at_the_pace_of_the_run_and_all_of_them_as_they_are() -> None:
    record = Durations({QUICK: {"tests/a/test_1.py": 10.0, "tests/b/test_2.py": 20.0, "tests/b/old.py": 1.0}})
    last = Durations(
        {
            QUICK: {"tests/a/test_1.py": 20.0, "tests/b/test_2.py": 90.0},
            REST: {"tests/b/test_3.py": 8.0, "tests/c/test_4.py": 40.0, "tests/d/test_5.py": 400.0},
        }
    )
    assert rewritten(record, last, []) == last
    record = Durations({**record.files, REST: {"tests/c/test_4.py": 20.0, "tests/d/test_5.py": 200.0}})
    assert rewritten(record, last, ["tests/b"]).files == {
        QUICK: {"tests/a/test_1.py": 10.0, "tests/b/test_2.py": 45.0},
        REST: {"tests/b/test_3.py": 4.0, "tests/c/test_4.py": 20.0, "tests/d/test_5.py": 200.0},
    }


def test_the_record_is_as_it_would_be_written() -> None:
    record = record_of(ROOT)
    assert json.loads(record.read_text()) == Durations.read(record).told()
