"""Tests of `python -m bench speculation`: the same requests with drafts and without."""

import json
from pathlib import Path

import pytest

from bench.engine.speculation_load import (
    RANDOM,
    WITH,
    WITHOUT,
    SpeculationPlan,
    SpeculationRound,
    summarise,
)

PROMPTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "prompts"


def _plan(*prompts: Path, random_tokens: int = 8) -> SpeculationPlan:
    return SpeculationPlan(3, (1, 4), prompts, random_tokens, 7)


def test_the_stored_prompts_are_loads_and_random_ones_are_the_same_for_a_seed() -> None:
    files = sorted(PROMPTS.glob("*.jsonl"))
    loads = _plan(*files).loads()
    assert list(loads) == [*(each.stem for each in files), RANDOM]
    assert len(loads[RANDOM]) == 4
    assert {each["temperature"] for each in loads[RANDOM]} == {1}
    assert loads == _plan(*files).loads()
    assert RANDOM not in _plan(random_tokens=0).loads()


@pytest.mark.parametrize("line", ['{"prompt": "x"}', "no JSON", "[]"])
def test_a_file_that_holds_no_prompts_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "x", "max_tokens": 4}) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.jsonl"):
        _plan(path).loads()


def test_rounds_are_compared_one_by_one() -> None:
    plain = [SpeculationRound(100, seconds, [[1, 2], [3]]) for seconds in (10.0, 20.0, 10.0)]
    drafted = [SpeculationRound(100, seconds, [[1, 2], [3]]) for seconds in (5.0, 5.0, 8.0)]
    drafted[2].answers = [[1, 2], [4]]
    assert summarise({WITH: drafted, WITHOUT: plain}) == {
        "output_tokens_per_s": {WITH: 20.0, WITHOUT: 10.0},
        "ratio": 2.0,
        "ratio_least": 1.25,
        "equal": "5 of 6",
    }
