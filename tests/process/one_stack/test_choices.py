"""Tests of several answers to one prompt: equal to answers of separate requests."""

import json
from collections import defaultdict
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from bench.__main__ import app
from tests.http import web
from tests.process.load import any_prompts
from tests.process.stack import Stack

QUESTION: Any = {"role": "user", "content": "Name an animal, and say what it eats."}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 2**63 - 3, "max_tokens": 12}


def test_eight_answers_streamed_are_those_of_eight_requests(client: openai.OpenAI, model: str) -> None:
    """The seeds of the choices wrap around from the largest to the smallest."""
    texts: dict[int, str] = defaultdict(str)
    finishes: dict[int, str] = {}
    stream = client.chat.completions.create(
        model=model,
        messages=[QUESTION],
        n=8,
        stream=True,
        stream_options={"include_usage": True},
        **DRAWN,
    )
    for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in finishes, "nothing follows an answer's end"
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    assert chunk.usage is not None
    prompt_tokens, drawn = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
    assert sorted(finishes) == list(range(8))
    assert len(set(texts.values())) > 4, "they differ"
    for place in (0, 1, 4, 7):
        alone = client.chat.completions.create(
            model=model, messages=[QUESTION], **DRAWN | {"seed": _signed(DRAWN["seed"] + place)}
        )
        assert alone.choices[0].message.content == texts[place]
        assert alone.usage is not None
        assert alone.usage.prompt_tokens == prompt_tokens
    assert 8 < drawn <= 8 * 12


def _signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def test_the_best_of_four_is_the_likeliest_and_a_stop_string_ends_its_own(
    idle_stack: Stack, client: openai.OpenAI, model: str
) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "My favourite animal is", "seed": 5, "max_tokens": 8}
    four = client.completions.create(n=4, logprobs=0, stop=[" the"], **asked)
    means = []
    for choice in four.choices:
        assert " the" not in choice.text
        assert choice.logprobs is not None
        told = choice.logprobs.token_logprobs or []
        means.append(sum(each or 0.0 for each in told) / len(told))
    best = client.completions.create(best_of=4, stop=[" the"], **asked)
    assert [each.text for each in best.choices] == [four.choices[means.index(max(means))].text]
    assert best.usage is not None
    assert four.usage is not None
    assert best.usage.completion_tokens == four.usage.completion_tokens


@pytest.mark.parametrize("max_tokens", [2000, None])
def test_more_than_the_cache_holds_is_refused_and_what_fits_is_served(
    idle_stack: Stack, max_tokens: int | None
) -> None:
    body = {"prompt": [5] * 40, "n": 8, "temperature": 0, "return_token_ids": True}
    url = f"{idle_stack.url}/v1/completions"
    if max_tokens is not None:
        reply = web().post(url, json=body | {"max_tokens": max_tokens})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
        assert "8 answers of up to 2000 tokens" in reply.json()["error"]["message"]
        return
    reply = web().post(url, json=body, timeout=120)
    ids = [choice["token_ids"] for choice in reply.json()["choices"]]
    assert len(ids) == 8
    assert all(each == ids[0] for each in ids), "greedily all are equal"


def choices_of(stack: Stack, prompt: list[int], **more: Any) -> list[list[int]]:
    """Return the token ids of each choice."""
    body = {"prompt": prompt, "max_tokens": 8, "return_token_ids": True, **more}
    reply = web().post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("length", "drawing"), [(16, {"temperature": 0.9, "presence_penalty": 0.3}), (130, {"temperature": 0})]
)
def test_own_draws_each_answer_is_that_of_a_request_with_its_seed(
    idle_stack: Stack, length: int, drawing: dict[str, Any]
) -> None:
    """Answers are compared token by token, where the prompt ends with a page and where it does not."""
    [prompt] = any_prompts([length], 40_000, seed=9)
    several = choices_of(idle_stack, prompt, n=4, seed=40, **drawing)
    assert several == [choices_of(idle_stack, prompt, seed=seed, **drawing)[0] for seed in range(40, 44)]
    assert len({*map(tuple, several)}) == (4 if drawing["temperature"] else 1)


@pytest.mark.timeout(300)
def test_the_pages_of_a_prompt_are_sent_once_for_eight_answers(idle_stack: Stack) -> None:
    one, eight = any_prompts((1_000, 1_000), 40_000, seed=10)
    sender = idle_stack.services["prefill-0"]

    def sent(prompt: list[int], count: int) -> float:
        before = sender.total("baton_kv_transfer_bytes_total")
        choices_of(idle_stack, prompt, n=count, seed=40, temperature=0.9)
        return sender.total("baton_kv_transfer_bytes_total") - before

    assert sent(eight, 8) == sent(one, 1) > 0


def test_the_benchmark_of_several_answers_sees_the_prompt_sent_once(idle_stack: Stack) -> None:
    lengths = ["--prompt-tokens", "150", "--output-tokens", "2", "--n", "4"]
    ran = CliRunner().invoke(app, ["choices", "--runs", "3", *lengths, "--url", idle_stack.url])
    assert ran.exit_code == 0, ran.output
    body = json.loads(ran.stdout)
    assert body["bytes"]["1"] == body["bytes"]["4"]
    assert len(body["bytes"]["1"]) == 1
    assert body["bytes"]["1"][0] > 0
    assert body["ratio_every"] >= body["ratio"] > 0
