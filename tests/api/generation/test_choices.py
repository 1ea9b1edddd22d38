"""Tests of several choices for one prompt: how they are drawn, separated and counted."""

import asyncio
import json
import logging
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Hangup, Limits, RoomFailed
from baton.api.requests.field_types import ANSWERS_MAX
from baton.api.requests.meaning_reader import chat_meaning, completion_meaning
from baton.api.requests.request_builder import admit
from baton.api.requests.schemas import ChatRequest, CompletionRequest
from baton.api.settings import ApiSettings
from baton.rooms.choice_pages import ChoicePages, longest_of, positions_of
from baton.rooms.errors import Reason
from baton.rooms.request import Request, Token, TokenBatch
from tests.api import tiny
from tests.api.chat.test_tools import CALL, NOW, WEATHER
from tests.api.http.test_http_exchange import lines
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS, chat, check, completion
from tests.api.scripted import LENGTH, LIMITS, STOP, ScriptedBackend, Step, batch, in_turn, saying

TEXTS = ("The quick fox", "It was", "Hello world again")
TELLING = Limits(context_tokens=8192, prompt_tokens=8000, sequence_tokens=8192)
"""Limits for prompts with tools."""


@pytest.fixture
def three(backend: ScriptedBackend) -> ScriptedBackend:
    backend.script = lambda _: in_turn(*map(saying, TEXTS))
    return backend


@pytest.fixture
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


def admitted(limits: Limits = LIMITS, prompt: int = 2, **fields: Any) -> Request:
    body = ChatRequest(**chat(**fields))
    (request,) = admit(body, chat_meaning(body), [[1] * prompt], tiny.model(), limits, "r", salt=0)
    return request


async def test_several_answers_are_one_request(client: openai.AsyncOpenAI, three: ScriptedBackend) -> None:
    user: Any = {"role": "user", "content": "hi"}
    reply = await client.chat.completions.create(model=tiny.MODEL, messages=[user], n=3, seed=7)
    assert [(each.index, each.message.content, each.finish_reason) for each in reply.choices] == [
        (place, text, "stop") for place, text in enumerate(TEXTS)
    ]
    (asked,) = three.asked
    assert (asked.sampling.seed, asked.further_seeds) == (7, (8, 9))
    drawn = sum(len(saying(text)) for text in TEXTS)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(asked.prompt), "the prompt is computed once"
    assert reply.usage.completion_tokens == drawn
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert not three.left_open


async def test_several_answers_are_streamed_side_by_side(
    client: openai.AsyncOpenAI, three: ScriptedBackend
) -> None:
    user: Any = {"role": "user", "content": "hi"}
    usage: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(
        model=tiny.MODEL, messages=[user], n=3, stream=True, stream_options=usage
    )
    texts: dict[int, str] = defaultdict(str)
    roles, finishes, order, own = [], {}, [], {}
    async for chunk in stream:
        for choice in chunk.choices:
            roles += [choice.index] if choice.delta.role else []
            texts[choice.index] += choice.delta.content or ""
            order.append(choice.index)
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
            assert chunk.usage is not None
            own[choice.index] = chunk.usage.completion_tokens
    assert tuple(texts[place] for place in range(3)) == TEXTS
    assert roles == [0, 1, 2]
    assert finishes == dict.fromkeys(range(3), "stop")
    assert order != sorted(order), "none waits for another"
    assert own == {place: len(saying(text)) for place, text in enumerate(TEXTS)}
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == sum(own.values())
    assert chunk.usage.prompt_tokens == len(three.asked[0].prompt)


async def test_answers_to_several_prompts_come_prompt_by_prompt(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda request: in_turn(
        *(saying(f"answer {request.prompt[0]}{letter}", finish=LENGTH) for letter in "ab")
    )
    reply = await http.post(COMPLETIONS, json=completion(prompt=[[5], [6]], n=2.0))
    assert [(each["index"], each["text"]) for each in reply.json()["choices"]] == [
        (0, "answer 5a"),
        (1, "answer 5b"),
        (2, "answer 6a"),
        (3, "answer 6b"),
    ]
    assert reply.json()["usage"]["prompt_tokens"] == 2
    assert [request.choices for request in backend.asked] == [2, 2]
    assert backend.asked[0].further_seeds != backend.asked[1].further_seeds, "each prompt has its own seed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_its_own_answer_and_the_last_one_the_request(
    http: httpx.AsyncClient, backend: ScriptedBackend, stream: bool
) -> None:
    backend.script = lambda _: in_turn(
        *(
            saying(text, finish=LENGTH)
            for text in ("The fox END and on", "It END and", "Hello END world again")
        )
    )
    reply = await http.post(CHAT, json=chat(n=3, stop="END", stream=stream))
    texts: dict[int, str] = defaultdict(str)
    for each in reply.text.splitlines():
        is_data = each.startswith("data: {") or not stream
        told = json.loads(each.removeprefix("data: ")) if is_data else {}
        for choice in told.get("choices", ()):
            message = choice["delta"] if stream else choice["message"]
            texts[choice["index"]] += message.get("content") or ""
            assert choice["finish_reason"] in (None, "stop")
    assert dict(texts) == {0: "The fox ", 1: "It ", 2: "Hello "}
    (served,) = backend.streams
    assert len({0, 1, 2}.difference(served.enough)) == 1, "the one whose string is complete last"
    assert served.hangups == [Hangup.STOP_STRING]


async def test_a_failure_is_that_of_all_answers(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [*saying("It", finish=LENGTH), RoomFailed("gone", Reason.DECODE_LOST)]
    check(await http.post(CHAT, json=chat(n=2)), 503, None)
    assert backend.streams[0].hangups == [Hangup.REQUEST_FAILED]


async def test_a_client_that_hangs_up_ends_all_answers(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: [batch(tiny.ids("It"), choice=1), asyncio.Event()]
    stream = await client.completions.create(model=tiny.MODEL, prompt="hi", n=2, stream=True)
    async for chunk in stream:
        assert chunk.choices[0].index == 1
        break
    await stream.close()
    async with asyncio.timeout(10):
        await backend.streams[0].hung_up.wait()
    assert backend.streams[0].hangups == [Hangup.CLIENT_GONE]


async def test_calls_of_several_answers_do_not_mix(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.known_limits = TELLING
    other = CALL.replace("Paris", "Oslo")
    backend.script = lambda _: in_turn(saying(CALL), saying("No call."), saying(other))
    reply = (await http.post(CHAT, json=chat(n=3, tools=[WEATHER, NOW]))).json()
    first, none, last = (each["message"] for each in reply["choices"])
    assert [each["finish_reason"] for each in reply["choices"]] == ["tool_calls", "stop", "tool_calls"]
    assert (none["content"], "tool_calls" in none) == ("No call.", False)
    cities = [json.loads(each["tool_calls"][0]["function"]["arguments"])["city"] for each in (first, last)]
    assert cities == ["Paris", "Oslo"]
    assert first["tool_calls"][0]["id"] != last["tool_calls"][0]["id"]


# ---- seeds


def test_each_answer_is_drawn_with_a_seed_of_its_own_and_what_that_is_is_known() -> None:
    last = -1
    assert admitted(n=3, seed=last).further_seeds == (0, 1)
    assert admitted(n=2, seed=-1).further_seeds == (0,)
    any_seed = admitted(n=3)
    assert any_seed.further_seeds == tuple((any_seed.sampling.seed + each) % 2**64 for each in (1, 2))
    for place in range(3):
        alone = admitted(seed=7 + place, max_tokens=9)
        assert admitted(n=3, seed=7, max_tokens=9).choice(place) == alone, (
            "as a request with its seed would be"
        )


# ---- the best of more


def likely(text: str, logprob: float) -> list[Step]:
    """Return the steps of an answer whose tokens all have this log-probability."""
    made: list[Step] = []
    for step in saying(text, top=0):
        assert not isinstance(step, BaseException | asyncio.Event)
        tokens = tuple(Token(token.id, logprob, token.top) for token in step.tokens)
        made.append(TokenBatch(tokens, step.finish))
    return made


DRAWN = [likely("worst", -3.0), likely("longer and the best one", -0.5), likely("so so", -1.0)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_likeliest_answers_are_given_and_all_are_counted(
    http: httpx.AsyncClient, backend: ScriptedBackend, registry: CollectorRegistry, path: str
) -> None:
    backend.script = lambda _: in_turn(*DRAWN)
    fields: dict[str, Any] = {"n": 2, "best_of": 3}
    reply = (await http.post(path, json=(chat if path == CHAT else completion)(**fields))).json()
    texts = [each["message"]["content"] if path == CHAT else each["text"] for each in reply["choices"]]
    assert texts == ["longer and the best one", "so so"]
    assert [each["index"] for each in reply["choices"]] == [0, 1]
    assert [each["logprobs"] for each in reply["choices"]] == [None, None], "nobody asked to see them"
    assert backend.asked[0].sampling.top_logprobs == 0
    assert reply["usage"]["completion_tokens"] == sum(map(len, DRAWN))

    def counted(outcome: str) -> float | None:
        return registry.get_sample_value("baton_choices_total", {"outcome": outcome})

    assert [counted(each) for each in ("given", "left_out", "unfinished")] == [2, 1, 0]


async def test_of_equally_likely_answers_the_first_is_given(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: in_turn(likely("one", -1.0), likely("another of more words", -1.0))
    reply = (await http.post(COMPLETIONS, json=completion(best_of=2, logprobs=0))).json()
    assert [each["text"] for each in reply["choices"]] == ["one"]
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-1.0] * len(likely("one", -1.0))


async def test_the_best_of_as_many_as_are_given_are_all_of_them(
    http: httpx.AsyncClient, three: ScriptedBackend
) -> None:
    for stream in (False, True):
        reply = await http.post(COMPLETIONS, json=completion(n=3, best_of=3, stream=stream))
        assert reply.status_code == 200
    assert {each.sampling.top_logprobs for each in three.asked} == {None}


# ---- what does not fit


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"n": 0}, "n", "at least 1"),
        ({"n": 129}, "n", "at most 128"),
        ({"n": 1.5}, "n", "whole number"),
        ({"n": True}, "n", "whole number"),
        ({"best_of": 0}, "best_of", "at least 1"),
        ({"n": 3, "best_of": 2}, "best_of", "'best_of' is 2, and 'n' is 3"),
        ({"best_of": 2, "stream": True}, "best_of", "not served with 'stream'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_numbers_of_answers_that_are_none(
    http: httpx.AsyncClient,
    backend: ScriptedBackend,
    path: str,
    fields: dict[str, Any],
    param: str,
    told: str,
) -> None:
    body = (chat if path == CHAT else completion)(**fields)
    assert told in check(await http.post(path, json=body), 400, param)
    assert backend.asked == []


@pytest.mark.parametrize("name", ["n", "best_of"])
async def test_so_many_answers_to_so_many_prompts_are_not_drawn_at_once(
    http: httpx.AsyncClient, backend: ScriptedBackend, name: str
) -> None:
    few = ANSWERS_MAX // 64
    body = completion(prompt=[[1]] * 64, max_tokens=1) | {name: few + 1}
    assert f"at most {ANSWERS_MAX}" in check(await http.post(COMPLETIONS, json=body), 400, name)
    assert backend.asked == []


def fitting(prompt: int, choices: int, limits: Limits) -> int:
    """Return the longest answers of which `choices` fit, found by trying."""
    pages = limits.sequence_tokens // limits.page_tokens
    most = limits.context_tokens - prompt
    for length in range(most, 0, -1):
        if ChoicePages(prompt, prompt + length - 1, choices, (limits.page_tokens,)).needed <= (pages,):
            return length
    return 0


@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("choices", [2, 8, 128])
@pytest.mark.parametrize("prompt", [1, 16, 17, 300])
async def test_as_many_answers_as_the_cache_holds_and_no_more(
    http: httpx.AsyncClient, backend: ScriptedBackend, prompt: int, choices: int, page_tokens: int
) -> None:
    backend.known_limits = limits = Limits(512, 400, 448, page_tokens=page_tokens)
    backend.script = lambda request: in_turn(*(saying("x", finish=LENGTH) for _ in range(request.choices)))
    most = fitting(prompt, choices, limits)
    body = completion(prompt=[1] * prompt, n=choices)
    if most:
        reply = await http.post(COMPLETIONS, json=body | {"max_tokens": most})
        assert reply.status_code == 200
    told = check(await http.post(COMPLETIONS, json=body | {"max_tokens": most + 1}), 400, "n")
    takes = positions_of(prompt, prompt + most, choices, page_tokens)
    assert f"{choices} answers" in told
    assert f"take {takes} positions" in told
    assert "holds 448" in told
    assert [request.max_tokens for request in backend.asked] == [most] * bool(most)


@pytest.mark.parametrize(
    ("prompt", "fields", "choices"),
    [
        (100, {"n": 2}, 2),
        (100, {"n": 8}, 8),
        (300, {"n": 4, "best_of": 8}, 8),
        (100, {"n": 2, "min_tokens": 80}, 2),
    ],
)
def test_answers_without_an_end_are_as_long_as_so_many_fit_beside_each_other(
    prompt: int, fields: dict[str, Any], choices: int
) -> None:
    assert admitted(LIMITS, prompt, **fields).max_tokens == fitting(prompt, choices, LIMITS)


def test_a_completion_without_an_end_is_as_long_as_so_many_may_be() -> None:
    body = CompletionRequest(**completion(n=64))
    request, *_ = admit(body, completion_meaning(body), [[1] * 300], tiny.model(), LIMITS, "r", salt=0)
    assert request.max_tokens == fitting(300, 64, LIMITS) == 2


def test_answers_longer_than_there_is_space_for_are_as_long_as_there_is() -> None:
    body = ChatRequest(**chat(n=8, max_tokens=400))
    asked = chat_meaning(body, clips=True)
    request, *_ = admit(body, asked, [[1] * 100], tiny.model(), LIMITS, "r", salt=0)
    assert request.max_tokens == fitting(100, 8, LIMITS)


def test_what_so_many_may_become_is_the_most_that_they_take() -> None:
    for page in (1, 4, 16):
        for beginning in (1, 4, 5, 16, 40):
            for choices in (1, 2, 7):
                for pages in range(-(-beginning // page) * choices, 40):
                    most = longest_of(beginning, choices, pages * page, page)
                    assert ChoicePages(beginning, most, choices, (page,)).needed <= (pages,)
                    assert ChoicePages(beginning, most + 1, choices, (page,)).needed > (pages,)


# ---- what is noted


async def test_one_line_tells_of_all_answers_and_the_prompt_is_logged_once(
    backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    backend.script = lambda _: in_turn(*map(saying, TEXTS))
    app = create_app(backend, tiny.model(), CollectorRegistry(), ApiSettings(log_prompts=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        assert (await http.post(CHAT, json=chat(n=3))).status_code == 200
    (line,) = lines(caplog, "request answered")
    assert (line["choices"], line["prompt_tokens"]) == (3, len(backend.asked[0].prompt))
    assert line["output_tokens"] == sum(len(saying(text)) for text in TEXTS)
    assert len(lines(caplog, "prompt")) == 1
    assert [(each["choice"], each["answer"]) for each in lines(caplog, "answer")] == list(enumerate(TEXTS))


async def test_answers_that_end_early_are_counted_as_such(
    http: httpx.AsyncClient, backend: ScriptedBackend, registry: CollectorRegistry
) -> None:
    backend.script = lambda _: [batch([tiny.END_ID], STOP), RoomFailed("gone", Reason.DECODE_LOST)]
    check(await http.post(CHAT, json=chat(n=3)), 503, None)
    assert registry.get_sample_value("baton_choices_total", {"outcome": "unfinished"}) == 2
