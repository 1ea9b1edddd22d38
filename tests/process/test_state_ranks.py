"""Tests of models with attention and states on workers of several ranks: output is the reference library's.

One rank, two tensor ranks or two stages compute prompts, of which the first stage has no attention. One rank
or two tensor ranks decode. `make verify-models` has more types."""

from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from tests.models.eight_heads import VOCABULARY, states
from tests.oracle import reference_greedy
from tests.process.load import Load, any_prompts, asked
from tests.process.stack import SPLIT, Stack, running_stack
from tests.process.test_failover import Killer, several

LENGTHS: Final = (1, 2, 16, 17, 64, 65, 130, 257)
OUTPUT_TOKENS: Final = 12
BROKEN_TOKENS: Final = 40
CHUNK: Final = {"chunk_tokens": "64"}
PATIENT: Final = {"connect_timeout_ms": "60000", **SPLIT}
PREFILL: Final[list[dict[str, str]]] = [CHUNK, {"tp": "2", **CHUNK}, {"pp": "2", **CHUNK}]
KINDS: Final = ("qwen3_5", "qwen3_5_moe", "granite")
DECODE: Final[list[dict[str, str]]] = [{"kv_cache_memory": "32MiB", **PATIENT}, {"tp": "2", **PATIENT}]
"""The first has more memory, so that a request to idle workers goes there."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "prefill"),
    [
        ("qwen3_5", PREFILL[1:]),
        *(pytest.param(each, PREFILL, marks=pytest.mark.all_models) for each in KINDS),
    ],
    ids=["qwen3_5", *(f"{each}, also from one rank" for each in KINDS)],
)
async def test_each_worker_serves_each_other_and_choices_outlive_their_decode_worker(
    kind: str, prefill: list[dict[str, str]], demo_model_dir: Path, tmp_path: Path
) -> None:
    model = states(tmp_path, demo_model_dir, kind)
    with running_stack(
        str(model), prefill=prefill, decode=DECODE, dtype="float32", kv_cache_memory="8MiB"
    ) as stack:
        start = stack.idle_gauges()
        pairs = product(range(len(prefill)), range(len(DECODE)))
        load = Load(stack, asked(model, any_prompts(LENGTHS, VOCABULARY), OUTPUT_TOKENS))
        await load.rounds_until({(f"prefill-{one}", f"decode-{other}") for one, other in pairs}, rounds_min=1)
        assert load.hung_up > 0
        stack.wait_idle(start)
        check_killed(stack, model)
        stack.wait_ready(len(prefill) + len(DECODE))
        stack.wait_idle(start)


def check_killed(stack: Stack, model: Path) -> None:
    """Check that two choices go on token for token when their decode worker is killed.

    It is the one of one process, whose exit its starter reports.
    """
    (prompt,) = any_prompts([150], VOCABULARY, seed=5)
    (greedy,) = reference_greedy(model, [prompt], BROKEN_TOKENS)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": BROKEN_TOKENS, "ignore_eos": True, "n": 2}
    killer = Killer(stack, "decode")
    broken, *_ = several(stack, killer, **body, temperature=0)
    assert killer.victim == "decode-0"
    assert broken == [greedy, greedy]
    stack.restart(killer.victim)
