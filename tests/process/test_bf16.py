"""Test of bfloat16: greedy output parts from the reference library's only where two tokens are tied.

Sums taken in another order round differently, so that the outputs cannot be the same throughout (the
reference's own differ between computing a prompt whole and token by token). Where they first part, the two
tokens must be tied: by the reference in fp32 they are closer than its two logits in bfloat16 can be wrong
there, or the one that came is the likelier.
(A fixed gap says nothing: a step of bfloat16 is 0.125 for logits from 16 to 32, and thirty layers of such
steps lie behind.) After that they are different texts, and nothing is compared. `pytest -s` shows each; in
fp32 there is none (`greedy.py`).
"""

from pathlib import Path

import pytest

from tests.oracle import Divergence, first_divergence, reference_greedy
from tests.process.greedy import OUTPUT_TOKENS, complete_all, short_prompts
from tests.process.stack import running_stack

BF16 = "bfloat16"


@pytest.mark.timeout(900)
async def test_the_first_difference_in_bfloat16_is_a_tie(demo_model_dir: Path) -> None:
    prompts = short_prompts(str(demo_model_dir))[::3]
    expected = reference_greedy(demo_model_dir, prompts, OUTPUT_TOKENS, BF16)
    with running_stack(str(demo_model_dir), dtype=BF16, kv_cache_memory="128MiB") as stack:
        outputs = await complete_all(stack.url, prompts, at_a_time=4)
    parted: dict[int, Divergence] = {}
    for index, (prompt, got, want) in enumerate(zip(prompts, outputs, expected, strict=True)):
        divergence = first_divergence(demo_model_dir, prompt, got, want, BF16)
        if divergence is not None:
            parted[index] = divergence
    report = [f"prompt {index} ({len(prompts[index])} tokens) {each}" for index, each in parted.items()]
    print(f"{len(prompts) - len(parted)} of {len(prompts)} outputs are the same", *report, sep="\n")  # noqa: T201
    assert all(each.tie for each in parted.values()), "\n".join(report)


def test_a_difference_that_is_no_tie_is_seen(demo_model_dir: Path) -> None:
    """The last token of each output is replaced by another one, as a wrong page would do."""
    prompts = short_prompts(str(demo_model_dir))[:3]
    for prompt, want in zip(prompts, reference_greedy(demo_model_dir, prompts, 4, BF16), strict=True):
        assert first_divergence(demo_model_dir, prompt, want, want, BF16) is None
        wrong = first_divergence(demo_model_dir, prompt, [*want[:-1], want[-1] ^ 1], want, BF16)
        assert wrong is not None
        assert wrong.place == 3
        assert not wrong.tie, str(wrong)
