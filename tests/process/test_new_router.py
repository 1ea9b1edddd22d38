"""Tests of a router that starts anew, beside workers with full prefix caches."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import pytest

from tests.http import web
from tests.process.load import any_prompts
from tests.process.stack import SPLIT, Stack, running_stack
from tests.process.structured import tiny_model

LENGTH: Final = 200
"""Tokens of a prompt: three hash blocks, and some more."""
AT_A_TIME: Final = 6
COMPUTED_BY_EACH: Final = 4
"""Prompts that each prefill worker has computed at least before the router ends."""
PROMPTS_MAX: Final = 240
REUSED: Final = "baton_prefix_reused_tokens_total"
LOGGED: Final = "baton_kv_log_workers"
WORKERS: Final = {"prefill": 2, "decode": 2}
LIMIT_S: Final = 60


@pytest.fixture(scope="module")
def model(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", demo_model_dir)


@pytest.fixture
def stack(model: Path) -> Iterator[Stack]:
    with running_stack(
        str(model), prefill=[{}, {}], decode=[SPLIT, SPLIT], dtype="float32", kv_cache_memory="16MiB"
    ) as made:
        yield made


def reused(stack: Stack) -> float:
    """Return the tokens of prompts that prefill workers have found in their caches so far."""
    return sum(stack.services[f"prefill-{number}"].total(REUSED) for number in range(2))


def computed(stack: Stack) -> list[float]:
    """Return the tokens that each prefill worker has computed."""
    return [stack.services[f"prefill-{number}"].total("baton_prefill_tokens_total") for number in range(2)]


def complete(stack: Stack, prompt: list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    reply = web().post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text


def knows_all_caches(stack: Stack) -> bool:
    known = stack.services["bootstrap"].metrics()
    return all(known[LOGGED, (("side", side),)] == count for side, count in WORKERS.items())


@pytest.mark.timeout(300)
def test_log_is_tree_a_new_router_sends_each_prompt_where_it_is_cached(stack: Stack) -> None:
    """Without the workers' logs many prompts go to the worker that has not computed them.

    Which worker computes a prompt depends on when reports arrive, so requests go on until both have some.
    """
    unsent = iter(any_prompts([LENGTH] * PROMPTS_MAX, 1_000))
    prompts: list[list[int]] = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        while min(computed(stack)) < COMPUTED_BY_EACH * LENGTH:
            together = [list(prompt) for prompt in islice(unsent, AT_A_TIME)]
            assert together, f"one prefill worker has computed nearly all: {computed(stack)}"
            list(pool.map(partial(complete, stack), together))
            prompts += together
    stack.services["bootstrap"].kill()
    stack.restart("bootstrap")
    stack.wait_ready(4)
    stack.wait_until(lambda: knows_all_caches(stack), LIMIT_S, "the new router reads every log")
    blind = 0
    for prompt in prompts:
        before = reused(stack)
        complete(stack, prompt)
        blind += reused(stack) == before
    assert blind == 0
