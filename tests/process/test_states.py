"""Tests of models whose layers have states, on two workers of each side."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.http import web
from tests.models.eight_heads import VOCABULARY, states
from tests.oracle import reference_greedy
from tests.process.load import any_prompts
from tests.process.stack import SPLIT, Stack, running_stack
from tests.process.test_failover import ANSWER_S, Killer, model_of, several
from tests.support.shared import Shared

LENGTHS: Final = (1, 16, 17, 100, 257)
OUTPUT_TOKENS: Final = 40

PAGE_TOKENS: Final = 16
PAGE_BYTES: Final = {"qwen3_next": PAGE_TOKENS * 2 * 2 * 16 * 4, "mamba2": 0}
"""Bytes of a page of keys and values: one layer, and two heads, of 16 numbers each."""
STATE_BYTES: Final = {
    "qwen3_next": 3 * (128 * 4 + 4 * 16 * 16) * 4,
    "mamba2": 2 * (384 * 4 + 8 * 16 * 16) * 4,
}
"""Bytes of a sequence's state: convolution and recurrent states of all layers, in float32."""


@pytest.fixture(scope="module", params=["qwen3_next", "mamba2"])
def model(
    request: pytest.FixtureRequest, demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return states(tmp_path_factory.mktemp("states"), demo_model_dir, request.param)


@pytest.fixture(scope="module")
def stacks(model: Path) -> Iterator[Shared[Stack]]:
    start = partial(
        running_stack,
        str(model),
        prefill=[{"chunk_tokens": "64"}, {"chunk_tokens": "64"}],
        decode=[SPLIT, SPLIT],
        dtype="float32",
        kv_cache_memory="8MiB",
    )
    with Shared(start) as shared:
        yield shared


@pytest.fixture
def stack(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


def model_type(model: Path) -> str:
    return str(json.loads((model / "config.json").read_text())["model_type"])


def sent(stack: Stack) -> int:
    """Return the bytes of pages and states that all prefill workers have sent."""
    workers = [each for name, each in stack.services.items() if name.startswith("prefill")]
    return int(sum(worker.total("baton_kv_transfer_bytes_total") for worker in workers))


def test_answers_are_those_of_generate(stack: Stack, model: Path) -> None:
    """Each prompt is computed in chunks, and its states are handed over with its pages."""
    prompts = any_prompts(LENGTHS, VOCABULARY)
    expected = reference_greedy(model, prompts, OUTPUT_TOKENS)
    body: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
    for prompt, answer in zip(prompts, expected, strict=True):
        assert several(stack, prompt=prompt, **body, n=1)[0] == [answer]


def test_a_hand_over_sends_the_state_of_a_sequence_once(stack: Stack, model: Path) -> None:
    """However long the prompt is, the bytes beside its pages of keys and values are the same."""
    kind, states = model_type(model), []
    for prompt in any_prompts([40, 200, 555], VOCABULARY, seed=31):
        before = sent(stack)
        body = {"model": model_of(stack), "prompt": prompt, "max_tokens": 2, "temperature": 0}
        assert web().post(f"{stack.url}/v1/completions", json=body, timeout=ANSWER_S).status_code == 200
        pages = -(-len(prompt) // PAGE_TOKENS)
        states.append(sent(stack) - before - pages * PAGE_BYTES[kind])
    assert len(set(states)) == 1
    assert states[0] == STATE_BYTES[kind]


def test_two_choices_go_on_token_for_token_when_their_decode_worker_is_killed(
    stack: Stack, model: Path
) -> None:
    start = stack.idle_gauges()
    (prompt,) = any_prompts([150], VOCABULARY, seed=5)
    (greedy,) = reference_greedy(model, [prompt], OUTPUT_TOKENS)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "n": 2}
    likeliest, *_ = several(stack, **body, temperature=0)
    assert likeliest == [greedy, greedy]
    killer = Killer(stack, "decode")
    broken, *_ = several(stack, killer, **body, temperature=0)
    assert killer.victim
    assert broken == [greedy, greedy]
    stack.restart(killer.victim)
    stack.wait_ready(4)
    stack.wait_idle(start)


def test_prompts_that_begin_alike_begin_with_a_cached_state(stack: Stack, model: Path) -> None:
    """States are stored behind a prompt's last block, and where it leaves one that is cached.

    Each prefill worker has a cache of its own. A model without pages has none.
    """
    start = stack.idle_gauges()
    whole, *others = any_prompts([400, 60, 60, 60], VOCABULARY, seed=9)
    prompts = [whole, *([*whole[:300], *other] for other in others)]
    expected = reference_greedy(model, prompts, OUTPUT_TOKENS)
    cached: list[int] = []
    for prompt, answer in zip(prompts, expected, strict=True):
        for _ in range(3):
            body = {"model": model_of(stack), "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
            more = {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
            reply = web().post(f"{stack.url}/v1/completions", json={**body, **more}, timeout=ANSWER_S).json()
            assert reply["choices"][0]["token_ids"][: len(answer)] == answer
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    if model_type(model) == "mamba2":
        assert max(cached) == 0
    else:
        assert max(cached[:3]) == 384, "the whole blocks of an equal prompt, but for its last token"
        assert set(cached[3:]) == {0, 288}, "where the others leave the first one"
    stack.wait_idle(start)
