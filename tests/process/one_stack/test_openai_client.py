"""Tests of the real `openai` client against a real stack."""

import time

import openai
import pytest

from tests.http import web
from tests.idle import IDLE_S, POLL_S
from tests.process.stack import Stack

QUESTION = "What is the capital of France?"


def test_chat_answers_paris(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
    )
    choice = reply.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_streamed_chat_is_the_same_text(client: openai.OpenAI, model: str) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 4, "a stream comes in pieces"


def test_completions_take_a_list_and_logprobs(client: openai.OpenAI, model: str) -> None:
    prompts = ["The capital of France is", "1, 2, 3, 4,"]
    reply = client.completions.create(model=model, prompt=prompts, temperature=0, max_tokens=4, logprobs=3)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert "Paris" in reply.choices[0].text
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == 4
        assert all(each is not None and each <= 0 for each in choice.logprobs.token_logprobs)


def test_chat_logprobs_name_the_drawn_token_first(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=20,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 20
        assert entry.top_logprobs[0].token == entry.token
        assert abs(entry.top_logprobs[0].logprob - entry.logprob) < 1e-5


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI, model: str) -> None:
    def draw(seed: int) -> str:
        reply = client.completions.create(
            model=model, prompt="Once upon a time", temperature=1.0, max_tokens=12, seed=seed
        )
        return reply.choices[0].text

    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="no-such", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "model_not_found"


def test_a_prompt_over_the_context_is_refused_and_touches_no_gauge(
    client: openai.OpenAI, model: str, idle_stack: Stack
) -> None:
    before = idle_stack.services["prefill-0"].total("baton_prefill_tokens_total")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt=[1] * 20_000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert idle_stack.services["prefill-0"].total("baton_prefill_tokens_total") == before


def test_a_room_can_be_explained_by_its_request_id(idle_stack: Stack, model: str) -> None:
    body = {"model": model, "prompt": "Hello", "max_tokens": 3, "temperature": 0}
    reply = web().post(
        f"{idle_stack.url}/v1/completions", json=body, headers={"X-Request-Id": "explain-me"}, timeout=60
    )
    assert reply.headers["X-Request-Id"] == "explain-me"
    rooms = web().get(f"{idle_stack.url}/rooms", params={"request_id": "explain-me"}).json()["rooms"]
    assert len(rooms) == 1
    room = _retired(idle_stack, rooms[0]["id"])
    names = [event["name"] for event in room["events"]]
    for expected in ("opened", "granted", "computing", "sealed", "landed", "admitted", "answered", "retired"):
        assert expected in names, names
    assert room["cause"] is None


def _retired(stack: Stack, room: str) -> dict[str, list[dict[str, str]]]:
    ends = time.monotonic() + IDLE_S
    while True:
        body: dict[str, list[dict[str, str]]] = web().get(f"{stack.url}/rooms/{room}").json()
        if body["phase"] == "retired":  # type: ignore[comparison-overlap]
            return body
        assert time.monotonic() < ends, body
        time.sleep(POLL_S)
