"""Tests of models whose layers have states, on two workers of each side."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.models.eight_heads import STATES, VOCABULARY, states
from tests.oracle import reference_greedy
from tests.process.load import any_prompts
from tests.process.stack import SPLIT, Stack, running_stack
from tests.process.test_failover import Killer, several
from tests.support.shared import Shared

LENGTHS: Final = (1, 16, 17, 100, 257)
OUTPUT_TOKENS: Final = 40


@pytest.fixture(scope="module", params=list(STATES))
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


def test_answers_are_those_of_generate(stack: Stack, model: Path) -> None:
    """Each prompt is computed in chunks, and its states are handed over with its pages."""
    prompts = any_prompts(LENGTHS, VOCABULARY)
    expected = reference_greedy(model, prompts, OUTPUT_TOKENS)
    body: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
    for prompt, answer in zip(prompts, expected, strict=True):
        assert several(stack, prompt=prompt, **body, n=1)[0] == [answer]


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
