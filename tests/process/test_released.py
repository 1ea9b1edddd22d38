"""Tests of released models served by ranks of differing numbers on both sides.

Two workers a side: prompts go from two ranks to one, from one to two, and as they come. Float32, several
requests at a time of which some hang up, token for token what the library's own `generate` says of the plain
numbers; most prompts are longer than the windows and chunks of 64 tokens. Afterwards every gauge of every
rank is back where it was.
"""

from pathlib import Path

import pytest

from tests.engine.tiny_models import VOCABULARY
from tests.process.load import Load, any_prompts, asked
from tests.process.released import SHAPES
from tests.process.stack import running_stack
from tests.process.test_groups import PATIENT, STEADY

OUTPUT_TOKENS = 10
PROMPTS = any_prompts((5, 63, 64, 65, 100, 129, 200, 300), VOCABULARY)
CHUNK_TOKENS = "48"
HERE = {"gemma 3, int4", "gpt-oss, mxfp4", "deepseek v3, fp8"}
"""Windows, other numbers, experts, and latents. The others are `make verify-models`'."""
PAIRS = {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}
TWO, ONE = {"tp": "2"}, {"tp": "1"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in HERE else pytest.mark.all_models) for each in SHAPES]
)
async def test_a_released_shape_is_served_from_two_ranks_to_one_and_back(
    name: str, tmp_path: Path, demo_model_dir: Path
) -> None:
    served, meant = SHAPES[name].save(tmp_path, demo_model_dir)
    known = asked(meant, PROMPTS, OUTPUT_TOKENS)
    with running_stack(
        str(served),
        prefill=[{**each, "chunk_tokens": CHUNK_TOKENS} for each in (TWO, ONE)],
        decode=[{**each, **PATIENT} for each in (ONE, TWO)],
        bootstrap=STEADY,
        dtype="float32",
        kv_cache_memory="4MiB",
    ) as stack:
        start = stack.idle_gauges()
        load = Load(stack, known, at_a_time=8)
        await load.rounds_until(PAIRS, rounds_min=1)
        assert load.hung_up > 0
        stack.wait_idle(start)
