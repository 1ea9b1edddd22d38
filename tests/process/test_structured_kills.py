"""Tests of constrained answers while a worker that computes or draws them is killed."""

from pathlib import Path
from typing import Final

from tests.process.structured import pairs, run, tiny_model

SCHEMAS: Final = 12
"""Schemas of this test. More by hand: `python -m tests.process.structured --schemas 1000`."""
LIMIT_S: Final = 240.0


def test_answers_validate_and_go_on_token_for_token_after_a_kill_of_either_side(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    with pairs(tiny_model(tmp_path / "tiny", demo_model_dir)) as stack:
        found = run(stack, SCHEMAS, kills=1, limit_s=LIMIT_S)
    assert found.sound, vars(found)
    assert found.valid == SCHEMAS
    assert min(found.went_on["prefill"], found.went_on["decode"]) >= 1
