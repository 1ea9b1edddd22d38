"""Are answers the same with drafts and without, and where a worker that drafts is killed?"""

from pathlib import Path
from typing import Final

from tests.process.speculated import drafting_pairs, run
from tests.process.structured import tiny_model

PROMPTS: Final = 16
"""By hand: `python -m tests.process.speculated --prompts 200`."""
LIMIT_S: Final = 240.0


def test_drawn_is_drawn_with_drafts_and_without_and_after_a_kill_of_either_side(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    with drafting_pairs(tiny_model(tmp_path / "tiny", demo_model_dir)) as stack:
        found = run(stack, PROMPTS, kills=1, limit_s=LIMIT_S)
    assert found.sound, vars(found)
    assert min(found.went_on["prefill"], found.went_on["decode"]) >= 1
