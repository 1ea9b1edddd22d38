"""Tests of `echo` and `prompt_logprobs`, as vLLM has them and evaluations use them."""

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.completions import completion_rendering
from baton.api.generation import prompt_encoder
from baton.api.generation.logprob_objects import ChatLogprobs
from baton.api.generation.logprobs import chat_logprobs
from baton.api.generation.prompt_encoder import echo_of
from baton.api.settings import ApiSettings
from baton.rooms.request import SCORES_MAX, Token
from tests.api import tiny
from tests.api.behaviours.sending import served
from tests.api.chat.test_reply_shapes import events
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS, chat, check, completion
from tests.api.scripted import LENGTH, STOP, ScriptedBackend, batch, in_turn, scores_of

TEXT = "The quick brown 🦊 jumps"
IDS = tiny.ids(TEXT)
FOX = tiny.ids(" fox")[0]
ALL = tiny.model().vocabulary


@pytest.fixture
def scoring(backend: ScriptedBackend) -> ScriptedBackend:
    """A backend that answers with one token."""

    backend.script = lambda asked: [batch([FOX], LENGTH, asked.sampling.top_logprobs)]
    return backend


async def answer(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post(COMPLETIONS, json=completion(**fields))
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
async def test_the_prompt_comes_before_its_answer(
    http: httpx.AsyncClient, scoring: ScriptedBackend, prompt: Any
) -> None:
    told = await answer(http, prompt=prompt, echo=True, max_tokens=1)
    assert told["choices"][0]["text"] == TEXT + " fox"
    assert told["choices"][0]["logprobs"] is None
    assert scoring.asked[0].prompt_logprobs is None, "nobody asks how likely it is"
    streamed = await events(http, COMPLETIONS, completion(prompt=prompt, echo=True, max_tokens=1))
    assert [each["choices"][0]["text"] for each in streamed] == [TEXT + " fox"]


@pytest.mark.parametrize("template", ["plain", "thinks"])
async def test_what_the_assistant_said_last_comes_before_a_chats_answer(template: str) -> None:
    """This holds whether the answer is parsed or not."""
    app = create_app(backend := ScriptedBackend(), served(template), CollectorRegistry())
    backend.script = lambda _: [batch([FOX]), batch([FOX], LENGTH)]
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "old"}]
    said = {"role": "assistant", "content": parts}
    asked = {"echo": True, "messages": [*chat()["messages"], said], "continue_final_message": True}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = (await http.post(CHAT, json=chat(**asked, logprobs=True))).json()
        streamed = await events(http, CHAT, chat(**asked))
        nobodys = (await http.post(CHAT, json=chat(echo=True))).json()
    assert reply["choices"][0]["message"]["content"] == "The old fox fox"
    assert len(reply["choices"][0]["logprobs"]["content"]) == 2, "of the answer alone"
    assert "".join(each["choices"][0]["delta"]["content"] for each in streamed) == "The old fox fox"
    assert nobodys["choices"][0]["message"]["content"] == " fox fox", "the user said that"


async def test_no_blocking_a_long_prompt_is_spelled_beside_the_event_loop(
    http: httpx.AsyncClient, scoring: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return echo_of(*given)

    monkeypatch.setattr(prompt_encoder, "echo_of", watched)
    monkeypatch.setattr(prompt_encoder, "INLINE_CHARS_MAX", len(IDS))
    for times in (1, 2):
        told = await answer(http, prompt=IDS * times, echo=True, max_tokens=1)
        assert told["choices"][0]["text"] == TEXT * times + " fox"
    assert threads[0] == threading.main_thread().name
    assert threads[1].startswith("tokenise")


async def test_each_of_several_prompts_comes_before_its_own_answer(
    http: httpx.AsyncClient, scoring: ScriptedBackend
) -> None:
    told = await answer(http, prompt=["The", TEXT], echo=True, max_tokens=1)
    assert [each["text"] for each in told["choices"]] == ["The fox", TEXT + " fox"]


async def test_of_a_prompt_that_was_shortened_what_is_left_comes(
    http: httpx.AsyncClient, scoring: ScriptedBackend
) -> None:
    told = await answer(http, prompt=TEXT, echo=True, max_tokens=1, truncate_prompt_tokens=2)
    assert (
        told["choices"][0]["text"]
        == tiny.model().tokenizer.decode(IDS[-2:], skip_special_tokens=False) + " fox"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_tokens_have_their_log_probabilities_before_the_answers(
    http: httpx.AsyncClient, scoring: ScriptedBackend, stream: bool
) -> None:
    fields: dict[str, Any] = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 1}
    if stream:
        ((choice,),) = (
            [each["choices"][0]] for each in await events(http, COMPLETIONS, completion(**fields))
        )
    else:
        (choice,) = (await answer(http, **fields))["choices"]
    told, (asked,) = choice["logprobs"], scoring.asked
    assert asked.prompt_logprobs == asked.sampling.top_logprobs == 1
    scores = scores_of(asked)
    assert told["token_logprobs"] == [None, *(each.logprob for each in scores), -0.5]
    assert told["top_logprobs"][0] is None
    greedy = [
        own == max(top.values())
        for own, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True)
    ]
    assert greedy == [*(each.rank == 1 for each in scores), True], "as lm-eval reads it"
    assert len(told["tokens"]) == len(told["text_offset"]) == len(IDS) + 1
    assert told["text_offset"][-1] == len(TEXT)
    for text, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert "\\x" in text or choice["text"][offset:].startswith(text)


async def test_of_an_answer_of_no_tokens_the_prompt_is_all(
    http: httpx.AsyncClient, scoring: ScriptedBackend
) -> None:
    """A worker draws a token all the same, which is not shown."""
    for fields in ({}, {"stop": ["quick", "fox"]}):
        told = await answer(http, prompt=TEXT, echo=True, logprobs=1, max_tokens=0, **fields)
        (choice,) = told["choices"]
        assert choice["text"] == TEXT
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(IDS)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert told["usage"]["completion_tokens"] == 0
    assert scoring.asked[0].max_tokens == 1
    (chunk,) = await events(http, COMPLETIONS, completion(prompt=TEXT, echo=True, max_tokens=0))
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == (TEXT, "length")
    check(await http.post(COMPLETIONS, json=completion(max_tokens=0)), 400, "max_tokens")
    check(
        await http.post(COMPLETIONS, json=completion(max_tokens=0, echo=True, min_tokens=1)),
        400,
        "min_tokens",
    )


async def test_a_stop_string_of_the_prompt_ends_nothing(
    http: httpx.AsyncClient, scoring: ScriptedBackend
) -> None:
    told = await answer(http, prompt=TEXT, echo=True, max_tokens=1, stop=["quick"])
    assert told["choices"][0]["text"] == TEXT + " fox"


def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
    text = tiny.model().tokenizer.token_bytes(token).decode(errors="backslashreplace")
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


async def test_prompt_logprobs_are_vllms_objects(http: httpx.AsyncClient, scoring: ScriptedBackend) -> None:
    (choice,) = (await answer(http, prompt=TEXT, prompt_logprobs=2, max_tokens=1))["choices"]
    chats = (await http.post(CHAT, json=chat(prompt_logprobs=2, max_tokens=1))).json()
    assert choice["logprobs"] is None
    assert choice["text"] == " fox"
    for told, asked in zip((choice, chats), scoring.asked, strict=True):
        shown = told["prompt_logprobs"]
        assert shown[0] is None
        assert len(shown) == len(asked.prompt)
        for token, score, entries in zip(asked.prompt[1:], scores_of(asked), shown[1:], strict=True):
            likeliest = {str(id_): entry(id_, each, rank) for rank, (id_, each) in enumerate(score.top, 1)}
            assert entries == likeliest | {str(token): entry(token, score.logprob, score.rank)}


async def test_each_of_two_that_ask_for_scores_gets_as_many_as_it_asks_for(
    http: httpx.AsyncClient, scoring: ScriptedBackend
) -> None:
    fields = {"prompt": TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 4, "max_tokens": 1}
    (choice,) = (await answer(http, **fields))["choices"]
    assert scoring.asked[0].prompt_logprobs == 4
    assert max(map(len, choice["logprobs"]["top_logprobs"][1:])) == 2
    assert max(map(len, choice["prompt_logprobs"][1:])) == 5


async def test_how_many_likeliest_tokens_are_told_is_bounded(
    http: httpx.AsyncClient, scoring: ScriptedBackend
) -> None:
    for path, fields, param in (
        (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
        (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (CHAT, chat(prompt_logprobs=-1), "prompt_logprobs"),
        (COMPLETIONS, completion(logprobs=-1), "logprobs"),
        (COMPLETIONS, completion(prompt_logprobs=21), "prompt_logprobs"),
        (COMPLETIONS, completion(logprobs=-2), "logprobs"),
    ):
        message = check(await http.post(path, json=fields), 400, param)
        assert ("--max-logprobs" in message) == (-2 not in fields.values())
    app = create_app(scoring, tiny.model(), CollectorRegistry(), ApiSettings(max_logprobs=-1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as unbound:
        assert (
            await unbound.post(CHAT, json=chat(logprobs=True, top_logprobs=-1, max_tokens=9))
        ).status_code == 200
        reply = await unbound.post(COMPLETIONS, json=completion(prompt_logprobs=-1))
    asked, scored = scoring.asked
    assert asked.sampling.top_logprobs == ALL == scored.prompt_logprobs
    assert reply.status_code == 200


async def test_a_whole_vocabulary_is_told_of_few_tokens_beside_the_event_loop(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def shown(*given: Any) -> ChatLogprobs:
        threads.append(threading.current_thread() is threading.main_thread())
        return chat_logprobs(*given)

    monkeypatch.setattr("baton.api.chat.chat_rendering.chat_logprobs", shown)
    monkeypatch.setattr("baton.api.generation.rendering.INLINE_LOGPROBS_MAX", 100)
    backend.script = lambda asked: [batch([FOX], LENGTH, asked.sampling.top_logprobs)]
    app = create_app(backend, tiny.model(), CollectorRegistry(), ApiSettings(max_logprobs=-1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": -1}
        assert (await http.post(CHAT, json=chat(**fields, max_tokens=2))).status_code == 200
        assert threads == [False]
        monkeypatch.setattr("baton.api.requests.request_builder.SHOWN_LOGPROBS_MAX", 3 * ALL)
        assert (await http.post(CHAT, json=chat(**fields, max_tokens=3))).status_code == 200
        for more in ({"max_tokens": 4}, {"max_tokens": 2, "n": 2}, {}):
            check(await http.post(CHAT, json=chat(**fields, **more)), 400, "top_logprobs")


async def test_more_scores_than_are_told_of_a_request_are_refused(
    http: httpx.AsyncClient, scoring: ScriptedBackend
) -> None:
    """The bound counts all prompts of a request, with each choice."""
    fits = completion(prompt=[[5] * 300] * (SCORES_MAX // (21 * 300)), prompt_logprobs=20)
    assert (await http.post(COMPLETIONS, json=fits)).status_code == 200
    for more in ({"n": 2}, {"prompt": [*fits["prompt"], [5] * 300]}):
        message = check(await http.post(COMPLETIONS, json=fits | more), 400, "prompt_logprobs")
        assert str(SCORES_MAX) in message


async def test_what_is_much_is_shown_beside_the_event_loop(
    http: httpx.AsyncClient, scoring: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.api.generation.rendering.INLINE_LOGPROBS_MAX", 100)
    seen: list[tuple[str, bool]] = []

    def shown(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def showing(*given: Any) -> Any:
            seen.append((what, threading.current_thread() is threading.main_thread()))
            return work(*given)

        return showing

    for name in ("shown_scores", "completion_logprobs"):
        work = shown(name, getattr(completion_rendering, name))
        monkeypatch.setattr(completion_rendering, name, work)
    asked = {"echo": True, "logprobs": 20, "max_tokens": 0}
    for count in (2, 300):
        await answer(http, prompt=[5] * count, prompt_logprobs=20, **asked)
        await events(http, COMPLETIONS, completion(prompt=[5] * count, **asked))
    whole = ["completion_logprobs", "shown_scores", "completion_logprobs"]
    assert seen == [*((each, True) for each in whole), *((each, False) for each in whole)]


async def test_given_tokens_are_told_beside_the_drawn_ones(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda asked: [
        type(batch([]))(
            (Token(FOX, -0.5, tuple((each, -1.0) for each in asked.sampling.logprob_token_ids)),), STOP
        )
    ]
    fields: dict[str, Any] = {"logprob_token_ids": [7, 5, 7], "return_tokens_as_token_ids": True}
    told = (await http.post(CHAT, json=chat(logprobs=True, **fields))).json()
    (content,) = told["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content["top_logprobs"]] == ["token_id:7", "token_id:5"]
    told = await answer(http, logprobs=0, **fields)
    assert [*told["choices"][0]["logprobs"]["top_logprobs"][0]] == [
        "token_id:7",
        "token_id:5",
        f"token_id:{FOX}",
    ]
    assert {each.sampling.top_logprobs for each in backend.asked} == {0}
    check(await http.post(CHAT, json=chat(**fields)), 400, "logprob_token_ids")
    check(
        await http.post(CHAT, json=chat(logprobs=True, logprob_token_ids=[ALL])), 400, "logprob_token_ids[0]"
    )


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        (CHAT, {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs", "unsupported_value"),
        (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "unsupported_value"),
        (CHAT, {"echo": 1}, "echo", "invalid_type"),
        (COMPLETIONS, {"echo": 1}, "echo", "invalid_type"),
        (CHAT, {"return_logprob": True}, "return_logprob", "unsupported_parameter"),
        (COMPLETIONS, {"logprob_start_len": 0}, "logprob_start_len", "unsupported_parameter"),
        (COMPLETIONS, {"top_logprobs_num": 2}, "top_logprobs_num", "unsupported_parameter"),
    ],
)
async def test_what_is_not_served_is_refused_by_its_name(
    http: httpx.AsyncClient,
    backend: ScriptedBackend,
    path: str,
    fields: dict[str, Any],
    param: str,
    code: str,
) -> None:
    check(await http.post(path, json=(chat if path == CHAT else completion)(**fields)), 400, param, code)
    assert backend.asked == []


async def test_of_two_tokens_that_are_one_text_the_likelier_is_told(
    http: httpx.AsyncClient, scoring: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a token that was not the likeliest would look as if it was."""
    monkeypatch.setattr("baton.api.completions.completion_rendering.token_text", lambda _, **__: "same")
    (choice,) = (await answer(http, prompt=TEXT, echo=True, logprobs=1, max_tokens=0))["choices"]
    scores = scores_of(scoring.asked[0])
    assert [each["same"] for each in choice["logprobs"]["top_logprobs"][1:]] == [
        max(each.logprob, each.top[0][1]) for each in scores
    ]


async def test_every_choice_of_a_prompt_begins_with_it(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    """The prompt is scored once."""
    backend.script = lambda _: in_turn([batch([FOX], LENGTH, 1)], [batch([IDS[0]], LENGTH, 1)])
    told = await answer(http, prompt=TEXT, echo=True, logprobs=1, n=2, max_tokens=1, prompt_logprobs=0)
    assert [each["text"] for each in told["choices"]] == [TEXT + " fox", TEXT + "The"]
    first, second = (each["logprobs"]["token_logprobs"] for each in told["choices"])
    assert first == second == [None, *(each.logprob for each in scores_of(backend.asked[0])), -0.5]
    assert told["choices"][0]["prompt_logprobs"] == told["choices"][1]["prompt_logprobs"]
    (asked,) = backend.asked
    assert asked.choices == 2
