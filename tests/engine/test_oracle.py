"""Tests that one pass over an answer agrees with the reference library's own `generate`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.test_equals_reference import random_prompts
from tests.oracle import reference_behind, reference_greedy

TOKENS = 12
PROMPTS = random_prompts((1, 7, 40))


@pytest.fixture(scope="module")
def model(tiny_dir: Callable[[str], Path]) -> Path:
    return tiny_dir("llama-gqa-untied")


@pytest.fixture(scope="module")
def right(model: Path) -> list[list[int]]:
    return reference_greedy(model, PROMPTS, TOKENS)


def test_a_right_answer_is_the_references(model: Path, right: list[list[int]]) -> None:
    assert reference_behind(model, PROMPTS, right, TOKENS) == right


@pytest.mark.parametrize("place", [0, 5])
def test_of_a_wrong_token_the_one_is_told_that_belongs_there(
    model: Path, right: list[list[int]], place: int
) -> None:
    wrong = [[*each[:place], each[place] ^ 1, *each[place + 1 :]] for each in right]
    told = reference_behind(model, PROMPTS, wrong, TOKENS)
    assert told == [each[: place + 1] for each in right]


def test_an_answer_that_ends_too_early_or_too_late_is_not_the_references(
    model: Path, right: list[list[int]]
) -> None:
    assert reference_behind(model, PROMPTS, [each[:-1] for each in right], TOKENS) == right
    assert reference_behind(model, PROMPTS, [[*each, 7] for each in right], TOKENS) == right
    assert reference_behind(model, PROMPTS, [[] for _ in PROMPTS], TOKENS) == [each[:1] for each in right]
