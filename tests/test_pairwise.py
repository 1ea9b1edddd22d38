"""Tests that a cover holds every value, or every pair, in few cases, and is the same each time."""

from collections.abc import Callable
from itertools import combinations

import pytest

from tests.pairwise import Case, Part, cover, every, parts_of

SIX = {
    "model": ("small", "demo"),
    "prefill": (1, 2, 4),
    "stages": (1, 2, 3),
    "decode": (1, 2, 4),
    "pages": ((16, 16), (16, 32), (32, 16)),
    "checksum": (False, True),
}


def small_is_all(case: Case) -> bool:
    return case["model"] == "small" or 4 not in (case["prefill"], case["decode"])


def some(case: Case) -> float:
    return float(1 + case["prefill"] * case["stages"])


def held(cases: list[Case], size: int = 2) -> set[Part]:
    return {part for case in cases for part in parts_of(case, size)}


@pytest.mark.parametrize("cost", [lambda case: 1.0, some], ids=["alike", "by-ranks"])
@pytest.mark.parametrize("allowed", [lambda case: True, small_is_all], ids=["all", "some-allowed"])
def test_every_pair_that_is_allowed_is_held_by_far_fewer_cases(
    allowed: Callable[[Case], bool], cost: Callable[[Case], float]
) -> None:
    cases = every(SIX, allowed)
    chosen = cover(cases, cost)
    assert held(chosen) == held(cases)
    assert len(chosen) < len(cases) / 10
    assert all(each in cases for each in chosen)
    assert cover(every(SIX, allowed), cost) == chosen


def test_the_pairs_are_those_that_two_loops_find() -> None:
    found = {
        frozenset([(one, value), (other, its)])
        for one, other in combinations(SIX, 2)
        for value in SIX[one]
        for its in SIX[other]
    }
    assert held(every(SIX)) == found


def test_two_values_each_of_three_dimensions_need_half_of_their_product() -> None:
    cases = every({"side": ("prefill", "decode"), "rank": (0, 1), "signal": ("KILL", "STOP")})
    assert len(cases) == 8
    assert len(cover(cases)) == 4


def test_single_values_need_as_many_cases_as_the_longest_dimension_has() -> None:
    chosen = cover(every(SIX), size=1)
    assert held(chosen, 1) == {frozenset([(name, value)]) for name in SIX for value in SIX[name]}
    assert len(chosen) == max(map(len, SIX.values()))


def test_of_no_cases_there_is_no_cover() -> None:
    assert cover([]) == []
