"""Tests of the unchanged `openai` client against the chat API on a real socket."""

import asyncio
from typing import Any

import openai
import pytest

from baton.api.backend import Hangup, Overloaded, RoomFailed
from baton.rooms.errors import Reason
from baton.rooms.request import Request
from tests.api import tiny
from tests.api.conftest import CREATED_S
from tests.api.scripted import LENGTH, ScriptedBackend, Step, batch, saying

HELLO: list[Any] = [{"role": "user", "content": "Say hello"}]


@pytest.fixture
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


async def test_chat(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    reply = await client.chat.completions.create(model=tiny.MODEL, messages=HELLO)
    assert reply.object == "chat.completion"
    assert reply.created == CREATED_S
    assert reply.id.startswith("chatcmpl-")
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    (asked,) = backend.asked
    prompt = "<|start|>user\nSay hello<|end|>\n<|start|>assistant\n"
    assert tiny.model().tokenizer.decode(asked.prompt, skip_special_tokens=False) == prompt
    assert asked.eos_token_ids == (tiny.END_ID,)
    assert asked.max_tokens == 450 - len(asked.prompt) + 1
    output = len(tiny.ids("Hello world")) + 1
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(asked.prompt)
    assert reply.usage.completion_tokens == output
    assert reply.usage.total_tokens == len(asked.prompt) + output
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert backend.left_open == []


async def test_chat_streamed(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = lambda _: saying("Grüße 😀 aus 東京")
    stream = await client.chat.completions.create(
        model=tiny.MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Grüße 😀 aus 東京"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == len(backend.asked[0].prompt)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_synchronous_client(url: str) -> None:
    def talk() -> tuple[str, str]:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)
        whole = client.chat.completions.create(model=tiny.MODEL, messages=HELLO)
        stream = client.chat.completions.create(model=tiny.MODEL, messages=HELLO, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        return whole.choices[0].message.content or "", streamed

    assert await asyncio.to_thread(talk) == ("Hello world", "Hello world")


async def test_completions_of_every_kind_of_prompt(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    kinds: list[tuple[Any, list[list[int]]]] = [
        ("The fox", [tiny.ids("The fox")]),
        (["The fox", "a dog"], [tiny.ids("The fox"), tiny.ids("a dog")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ]
    for prompt, expected in kinds:
        backend.asked.clear()
        backend.script = lambda request: saying(f"<{len(request.prompt)}>")
        reply = await client.completions.create(model=tiny.MODEL, prompt=prompt)
        assert [list(request.prompt) for request in backend.asked] == expected
        assert [(c.index, c.text) for c in reply.choices] == [
            (place, f"<{len(ids)}>") for place, ids in enumerate(expected)
        ]
        assert len({request.request_id for request in backend.asked}) == len(expected)
        assert all(request.max_tokens == 16 for request in backend.asked)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == sum(map(len, expected))


async def test_completions_streamed_for_several_prompts(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda request: saying(f"answer {request.prompt[0]} ends", finish=LENGTH)
    stream = await client.completions.create(
        model=tiny.MODEL, prompt=[[5], [6], [7]], stream=True, stream_options={"include_usage": True}
    )
    texts, finishes = {0: "", 1: "", 2: ""}, {}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    assert texts == {0: "answer 5 ends", 1: "answer 6 ends", 2: "answer 7 ends"}
    assert finishes == dict.fromkeys(range(3), "length")
    assert chunk.usage is not None
    assert chunk.usage.prompt_tokens == 3


async def test_chat_logprobs(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = lambda _: saying("Hi 😀", top=2, finish=LENGTH)
    reply = await client.chat.completions.create(
        model=tiny.MODEL, messages=HELLO, logprobs=True, top_logprobs=2
    )
    assert backend.asked[0].sampling.top_logprobs == 2
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    assert len(content) == len(tiny.ids("Hi 😀"))
    assert b"".join(bytes(each.bytes or ()) for each in content).decode() == "Hi 😀"
    assert content[0].logprob == -0.5
    assert [top.logprob for top in content[0].top_logprobs] == [-2.0, -3.0]

    stream = await client.chat.completions.create(
        model=tiny.MODEL, messages=HELLO, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [
        entry
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == content


async def test_completion_logprobs(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = lambda _: saying("The fox", top=1, finish=LENGTH)
    reply = await client.completions.create(model=tiny.MODEL, prompt="x", logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == "The fox" == reply.choices[0].text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert "The fox"[offset:].startswith(token)
    assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens)
    assert logprobs.top_logprobs is not None
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert top[token] == -0.5
        assert len(top) == 2


async def test_a_stop_string_hangs_up_and_ends_as_a_stop(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    never = asyncio.Event()
    backend.script = lambda _: [*saying("one two END three", finish=LENGTH)[:-1], never]
    reply = await client.chat.completions.create(model=tiny.MODEL, messages=HELLO, stop=["END"])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("one two ", "stop")
    stream = await client.chat.completions.create(model=tiny.MODEL, messages=HELLO, stop=["END"], stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "one two "
    assert chunks[-1].finish_reason == "stop"
    assert [stream.hangups for stream in backend.streams] == [[Hangup.STOP_STRING]] * 2


async def test_models(client: openai.AsyncOpenAI) -> None:
    (card,) = [model async for model in client.models.list()]
    assert (card.id, card.object, card.created) == (tiny.MODEL, "model", CREATED_S)
    assert await client.models.retrieve(tiny.MODEL) == card
    with pytest.raises(openai.NotFoundError) as told:
        await client.models.retrieve("other/model")
    assert told.value.code == "model_not_found"


async def test_errors_have_their_own_exceptions(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=tiny.MODEL, messages=[])
    assert (bad.value.param, bad.value.type) == ("messages", "invalid_request_error")
    backend.script = lambda _: Overloaded("the queue is full", 7)
    with pytest.raises(openai.RateLimitError) as busy:
        await client.chat.completions.create(model=tiny.MODEL, messages=HELLO)
    assert busy.value.response.headers["retry-after"] == "7"


async def test_a_failure_in_mid_stream_is_raised_by_the_client(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    def script(_: Request) -> list[Step]:
        return [batch(tiny.ids("The fox")), RoomFailed("the decode worker died", Reason.DECODE_LOST)]

    backend.script = script
    stream = await client.chat.completions.create(model=tiny.MODEL, messages=HELLO, stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 - kept when it raises

    with pytest.raises(openai.APIError, match="the decode worker died") as told:
        await read()
    assert "".join(texts) == "The fox"
    assert told.value.code == "decode_lost"


async def test_the_first_token_does_not_wait_for_the_second(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    rest = asyncio.Event()
    backend.script = lambda _: [batch(tiny.ids("The")), rest, batch(tiny.ids(" fox"), LENGTH)]
    stream = await client.chat.completions.create(model=tiny.MODEL, messages=HELLO, stream=True)
    seen = ""
    async for chunk in stream:
        seen += chunk.choices[0].delta.content or ""
        if seen == "The":
            rest.set()
    assert seen == "The fox"


async def test_everything_asked_for_reaches_the_backend(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    await client.chat.completions.create(
        model=tiny.MODEL,
        messages=HELLO,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        seed=-1,
        logit_bias={"7": -100, "5": 2},
        user="someone",
        store=False,
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [9, 8, 9],
            "ignore_eos": True,
        },
    )
    (asked,) = backend.asked
    assert (asked.max_tokens, asked.min_tokens, asked.stop_token_ids, asked.ignore_eos) == (
        9,
        2,
        (9, 8),
        True,
    )
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.2)
    assert sampling.repetition_penalty == 1.1
    assert sampling.seed == 2**64 - 1
    assert sampling.logit_bias == ((5, 2.0), (7, -100.0))


async def test_seeds_are_drawn_where_none_is_given(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    for _ in range(3):
        await client.chat.completions.create(model=tiny.MODEL, messages=HELLO)
    seeds = {request.sampling.seed for request in backend.asked}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(("seed", "seeds"), [(None, 3), (7, 1)])
async def test_equal_prompts_of_a_request_differ_in_their_draws_unless_a_seed_is_given(
    client: openai.AsyncOpenAI, backend: ScriptedBackend, seed: int | None, seeds: int
) -> None:
    await client.completions.create(model=tiny.MODEL, prompt=["Once"] * 3, seed=seed)
    assert len(backend.asked) == 3
    assert len({request.sampling.seed for request in backend.asked}) == seeds
