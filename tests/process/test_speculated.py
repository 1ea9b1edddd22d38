"""Tests of draft tokens: answers are the same with them, without, and when a drafting worker is killed."""

from pathlib import Path
from typing import Any, Final

import pytest

from tests.http import web
from tests.process.speculated import drafting_pairs, drafts_of, run
from tests.process.stack import Stack, running_stack
from tests.process.structured import tiny_model

PROMPTS: Final = 8
"""Prompts of this test. More by hand: `python -m tests.process.speculated --prompts 200`."""
LIMIT_S: Final = 240.0


@pytest.mark.parametrize("drafts", ["ngram", pytest.param("model", marks=pytest.mark.all_models)])
def test_drawn_is_drawn_with_drafts_and_without_and_after_a_kill_of_either_side(
    tmp_path: Path, demo_model_dir: Path, drafts: str
) -> None:
    """Drafts come from the text, and from another random model, which is mostly wrong."""
    speculate = drafts
    if drafts == "model":
        speculate += f":{tiny_model(tmp_path / 'drafts', demo_model_dir, layers=1)}"
    with drafting_pairs(tiny_model(tmp_path / "tiny", demo_model_dir), speculate) as stack:
        found = run(stack, PROMPTS, kills=1, limit_s=LIMIT_S)
        assert drafts_of(stack, "taken", drafts) > 0
        assert drafts_of(stack, "missed", "grammar") == 0
    assert found.sound, vars(found)
    assert min(found.went_on["prefill"], found.went_on["decode"]) >= 1


NAMES: Final = [f"a rather long name of field number {number}" for number in range(4)]
SCHEMA: Final = {
    "type": "object",
    "properties": {name: {"type": "boolean"} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
}


def answered(stack: Stack, prompt: str, **more: Any) -> list[int]:
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 150, "return_token_ids": True, **more}
    reply = web().post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return ids


def test_a_model_drafts_for_itself_and_is_always_right_and_so_is_a_grammar(demo_model_dir: Path) -> None:
    """Greedy and drawn, in float32; of an answer of long names most tokens are drafts."""
    settings = {"speculate": f"model:{demo_model_dir}:8", "draft_memory": "64MiB"}
    with running_stack(
        str(demo_model_dir),
        decode=[settings],
        dtype="float32",
        kv_cache_memory="256MiB",
    ) as stack:
        start = stack.idle_gauges()
        prompt = "The tide comes in twice a day, because"
        for more in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
            plain, drafted = (
                answered(stack, prompt, ignore_eos=True, speculate=speculate, **more)
                for speculate in (False, True)
            )
            assert plain == drafted
        taken, missed = (drafts_of(stack, outcome, "model") for outcome in ("taken", "missed"))
        assert taken > 100
        assert missed == 0
        form = {"temperature": 0, "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
        plain, drafted = (answered(stack, prompt, speculate=speculate, **form) for speculate in (False, True))
        assert plain == drafted
        assert drafts_of(stack, "taken", "grammar") > len(plain) / 2
        assert drafts_of(stack, "missed", "grammar") == 0
        stack.wait_idle(start)
