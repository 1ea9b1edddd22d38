"""Tests of shared prefixes: computed and sent once, with the reference library's answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http import web
from tests.oracle import reference_behind
from tests.process.stack import Stack, running_stack

OUTPUT_TOKENS = 8
BEGINNING = [*range(2000, 3000)]
WHOLE = 992
"""Tokens of the prompt in whole pages of 16."""


@pytest.fixture(params=["one", pytest.param("tp3", marks=pytest.mark.all_groups)])
def small(request: pytest.FixtureRequest, demo_model_dir: Path) -> Iterator[Stack]:
    """Caches that hold two of the prompts, and not three."""
    if request.param == "one":
        yield request.getfixturevalue("breakable")
        return
    with running_stack(
        str(demo_model_dir),
        prefill=[{"kv_cache_memory": "43MiB", "tp": "3"}],
        decode=[{"kv_cache_memory": "128MiB"}],
        dtype="float32",
        kv_checksum="pages",
    ) as stack:
        yield stack


def complete(stack: Stack, prompt: list[int]) -> tuple[list[int], int]:
    """Return the drawn tokens, and the number of cached prompt tokens."""
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = web().post(f"{stack.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    return reply.json()["choices"][0]["token_ids"], usage["prompt_tokens_details"]["cached_tokens"]


def sent(stack: Stack) -> float:
    """Return the bytes of pages that the first rank has sent."""
    return stack.services["prefill-0"].total("baton_kv_transfer_bytes_total")


def pages_sent(stack: Stack, prompt: list[int]) -> tuple[list[int], int, float]:
    before = sent(stack)
    tokens, cached = complete(stack, prompt)
    return tokens, cached, sent(stack) - before


@pytest.mark.timeout(600)
def test_a_beginning_that_comes_again_is_not_computed_and_not_sent_again(
    small: Stack, demo_model_dir: Path
) -> None:
    start = small.idle_gauges()
    other = [*BEGINNING, 17, 18, 19]
    first, cached, cold_bytes = pages_sent(small, BEGINNING)
    assert cached == 0
    second, cached, warm_bytes = pages_sent(small, BEGINNING)
    assert (second, cached) == (first, WHOLE)
    assert warm_bytes <= cold_bytes / 50
    third, cached, warm_bytes = pages_sent(small, other)
    assert cached == WHOLE
    assert warm_bytes <= cold_bytes / 50
    answers = [first, third]
    assert answers == reference_behind(demo_model_dir, [BEGINNING, other], answers, OUTPUT_TOKENS)
    small.wait_idle(start)


@pytest.mark.timeout(600)
def test_what_was_given_up_for_others_is_computed_again(small: Stack, demo_model_dir: Path) -> None:
    """There are more prompts than the caches hold. Each answer is right, whether its pages were still cached
    or not."""
    start = small.idle_gauges()
    prompts = [[first, *BEGINNING] for first in (5, 6, 7)]
    answers, cached_at_first = zip(*(complete(small, prompt) for prompt in prompts), strict=True)
    assert set(cached_at_first) == {0}
    assert list(answers) == reference_behind(demo_model_dir, prompts, answers, OUTPUT_TOKENS)
    again, cached = complete(small, prompts[0])
    assert again == answers[0]
    assert cached < WHOLE, "its end, at least, was given up"
    assert complete(small, prompts[-1]) == (answers[-1], WHOLE)
    small.wait_idle(start)
