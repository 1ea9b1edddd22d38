"""Tests of a DeepSeek V3, whose heads share latents, on two workers of differing ranks on each side."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.http import web
from tests.models.eight_heads import LATENTS, VOCABULARY, latents
from tests.oracle import reference_greedy
from tests.process.load import any_prompts
from tests.process.stack import SPLIT, Stack, running_stack
from tests.process.test_failover import Killer, model_of, rooms_of, several
from tests.support.shared import Shared

PAGE_TOKENS: Final = 16
LENGTHS: Final = (1, 16, 17, 100, 257)
OUTPUT_TOKENS: Final = 60
DECODE_RANKS: Final = {"decode-0": 1, "decode-1": 2}
SENT: Final = "baton_kv_transfer_bytes_total"


@pytest.fixture(scope="module")
def model(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return latents(tmp_path_factory.mktemp("latents"), demo_model_dir)


@pytest.fixture(scope="module")
def stacks(model: Path) -> Iterator[Shared[Stack]]:
    start = partial(
        running_stack,
        str(model),
        prefill=[{"tp": "2", "chunk_tokens": "64"}, {"pp": "2", "chunk_tokens": "64"}],
        decode=[{"tp": str(ranks), **SPLIT} for ranks in DECODE_RANKS.values()],
        dtype="float32",
        kv_cache_memory="8MiB",
    )
    with Shared(start) as shared:
        yield shared


@pytest.fixture
def stack(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


def sent(stack: Stack) -> int:
    """Return the bytes of pages that all ranks of all prefill workers have sent."""
    ranks = [
        replace(service, http=rank.http)
        for name, service in stack.services.items()
        if name.startswith("prefill")
        for rank in service.ranks()
    ]
    assert len(ranks) == 4
    return int(sum(rank.total(SENT) for rank in ranks))


def test_each_decode_rank_gets_one_latent_a_token_and_layer(stack: Stack, model: Path) -> None:
    """Whichever ranks have computed it, it is sent to each decode rank once."""
    prompts = any_prompts(LENGTHS, VOCABULARY)
    expected = reference_greedy(model, prompts, 4)
    latent_bytes = 4 * (LATENTS.kv_lora_rank + LATENTS.qk_rope_head_dim)
    for prompt, answer in zip(prompts, expected, strict=True):
        before = sent(stack)
        body = {"model": model_of(stack), "prompt": prompt, "max_tokens": 4, "temperature": 0}
        reply = web().post(f"{stack.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
        assert reply.json()["choices"][0]["token_ids"] == answer
        (room,) = rooms_of(stack, reply.headers["x-request-id"])
        positions = -(-len(prompt) // PAGE_TOKENS) * PAGE_TOKENS * DECODE_RANKS[room["decode"]]
        assert sent(stack) - before == positions * LATENTS.num_hidden_layers * latent_bytes


def test_two_choices_go_on_token_for_token_when_their_decode_worker_is_killed(
    stack: Stack, model: Path
) -> None:
    """Greedily the first is what the library draws, and with seeds both are those of the unbroken stream."""
    start = stack.idle_gauges()
    (prompt,) = any_prompts([150], VOCABULARY, seed=9)
    (greedy,) = reference_greedy(model, [prompt], OUTPUT_TOKENS)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "n": 2}
    likeliest, *_ = several(stack, **body, temperature=0)
    assert likeliest == [greedy, greedy]
    unbroken = several(stack, **body, seed=5)
    killer = Killer(stack, "decode")
    broken = several(stack, killer, **body, seed=5)
    assert killer.victim
    assert broken[:2] == unbroken[:2]
    assert broken[0][0] != broken[0][1]
    stack.restart(killer.victim)
    stack.wait_ready(4)
    stack.wait_idle(start)
