"""Tests of the exact objects on the wire, chunk by chunk."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import httpx
import pytest

from baton.api.chat import chat_rendering
from baton.api.completions import completion_rendering
from baton.rooms.request import Token, TokenBatch
from tests.api import tiny
from tests.api.conftest import CREATED_S
from tests.api.scripted import LENGTH, STOP, ScriptedBackend, batch

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ID = {"X-Request-Id": "r1"}
MATCHED = {"stop": tiny.END_ID}
T, FOX = tiny.ids("The")[0], tiny.ids(" fox")[0]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": tiny.MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": tiny.MODEL, "prompt": [5, 6], **fields}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    reply = await http.post(path, json=body | {"stream": True}, headers=ID)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-request-id"] == "r1"
    *blocks, rest = reply.text.split("\n\n")
    assert rest == ""
    assert all(block.startswith("id: ") for block in blocks)
    told = [block.partition("\ndata: ")[2] for block in blocks]
    assert told.pop() == "[DONE]"
    return [json.loads(each) for each in told]


def chat_chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    ended = {
        "finish_reason": finish,
        **({} if finish is None else {"stop_reason": None, "matched_stop": MATCHED.get(finish)}),
    }
    choice = {
        "index": 0,
        "delta": {**delta, "reasoning_content": None},
        "logprobs": None,
        **ended,
        **more.pop("choice", {}),
    }
    return {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": CREATED_S,
        "model": tiny.MODEL,
        "system_fingerprint": None,
        "choices": [choice],
        **more,
    }


ROLE = {"role": "assistant", "content": "", "refusal": None}


async def test_chat_chunks(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [batch([T]), batch([FOX]), batch([tiny.END_ID], STOP)]
    assert await events(http, CHAT, chat()) == [
        chat_chunk(ROLE),
        chat_chunk({"content": tiny.model().tokenizer.decode([T], skip_special_tokens=True)}),
        chat_chunk({"content": tiny.model().tokenizer.decode([FOX], skip_special_tokens=True)}),
        chat_chunk({}, "stop"),
    ]


async def test_a_null_counts_as_not_given_in_an_object_within_the_body_too(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: [batch([T], LENGTH)]
    options = {"include_usage": True, "include_obfuscation": None}
    assert (await events(http, CHAT, chat(stream_options=options)))[-1]["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat(logprobs=True)), (COMPLETIONS, completion(logprobs=2))]
)
async def test_a_long_whole_answers_logprobs_are_rendered_as_they_come(
    path: str,
    body: dict[str, Any],
    http: httpx.AsyncClient,
    backend: ScriptedBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rendering all of it at the end would block all other requests."""
    rendered: list[int] = []
    for module in (chat_rendering, completion_rendering):
        for name in ("chat_logprobs", "completion_logprobs"):
            shown = getattr(module, name, None)
            if shown is not None:
                monkeypatch.setattr(module, name, _counting(shown, rendered))
    backend.script = lambda _: [*(batch([T], top=1) for _ in range(50)), batch([FOX], LENGTH, top=1)]
    (choice,) = (await http.post(path, json=body)).json()["choices"]
    assert max(rendered) == 1
    logprobs = choice["logprobs"]
    if path == CHAT:
        assert [each["bytes"] for each in logprobs["content"]] == [[*b"The"]] * 50 + [[*b" fox"]]
        assert logprobs["refusal"] is None
    else:
        assert {len(each) for each in logprobs.values()} == {51}
        assert logprobs["tokens"] == ["The"] * 50 + [" fox"]
        assert logprobs["text_offset"] == [3 * each for each in range(51)]


def _counting(shown: Callable[..., Any], rendered: list[int]) -> Callable[..., Any]:
    def counted(tokens: Sequence[Token], *rest: Any) -> Any:
        rendered.append(len(tokens))
        return shown(tokens, *rest)

    return counted


async def test_a_chunk_for_each_token_of_a_batch(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [batch([T, FOX], LENGTH)]
    assert await events(http, CHAT, chat()) == [
        chat_chunk(ROLE),
        chat_chunk({"content": "The"}),
        chat_chunk({"content": " fox"}, "length"),
    ]


async def test_chat_usage_and_token_ids(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [batch([T], LENGTH)]
    body = chat(return_token_ids=True, stream_options={"include_usage": True})
    first, end, usage = await events(http, CHAT, body)
    prompt = list(backend.asked[0].prompt)
    assert first == chat_chunk(ROLE, prompt_token_ids=prompt, usage=None)
    assert end["choices"][0]["token_ids"] == [T]
    assert (end["choices"][0]["finish_reason"], end["usage"]) == ("length", None)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 1,
        "total_tokens": len(prompt) + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion(prompt=[[5, 6], [7]]))])
async def test_usage_so_far_in_each_chunk(
    path: str, body: dict[str, Any], http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    """Load generators use it to count tokens."""
    backend.script = lambda _: [batch([T]), batch([FOX, T]), batch([tiny.END_ID], STOP)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, end = await events(http, path, body | {"stream_options": options})
    for index, request in enumerate(backend.asked):
        told = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        prompt = len(request.prompt)
        counts = [0, 1, 2, 3, 4] if path == CHAT else [1, 2, 3, 4]  # a chat opens with its role
        assert told == [
            {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
            for count in counts
        ]
    assert end["choices"] == []
    assert end["usage"]["completion_tokens"] == 4 * len(backend.asked)
    options["include_usage"] = False
    assert all("usage" not in chunk for chunk in await events(http, path, body | {"stream_options": options}))


NO_REASONING: Final = {"reasoning_content": None, "reasoning": None}


async def test_whole_chat(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [batch([T, tiny.END_ID], STOP)]
    reply = (await http.post(CHAT, json=chat(return_token_ids=True), headers=ID)).json()
    prompt = list(backend.asked[0].prompt)
    text = tiny.model().tokenizer.decode([T], skip_special_tokens=True)
    assert reply == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": CREATED_S,
        "model": tiny.MODEL,
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None, **NO_REASONING},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "matched_stop": tiny.END_ID,
                "token_ids": [T, tiny.END_ID],
            }
        ],
        "prompt_token_ids": prompt,
        "prompt_logprobs": None,
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 2,
            "total_tokens": len(prompt) + 2,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_completion_chunks(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [batch(tiny.ids("The")), batch(tiny.ids(" fox"), LENGTH)]
    head = {
        "id": "cmpl-r1",
        "object": "text_completion",
        "created": CREATED_S,
        "model": tiny.MODEL,
        "system_fingerprint": None,
    }
    going_on: dict[str, Any] = {"finish_reason": None, "stop_reason": None, "matched_stop": None}
    ended = {"finish_reason": "length", "stop_reason": None, "matched_stop": None}
    assert await events(http, COMPLETIONS, completion()) == [
        {**head, "choices": [{"index": 0, "text": "The", "logprobs": None, **going_on}]},
        {**head, "choices": [{"index": 0, "text": " fox", "logprobs": None, **ended}]},
    ]


async def test_whole_completion_with_token_ids(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [batch([T], LENGTH)]
    body = completion(return_token_ids=True, prompt=[[5, 6], [7]])
    reply = (await http.post(COMPLETIONS, json=body, headers=ID)).json()
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [[5, 6], [7]]
    assert [choice["token_ids"] for choice in reply["choices"]] == [[T], [T]]
    assert [request.request_id for request in backend.asked] == ["r1-0", "r1-1"]


async def test_token_ids_of_a_streamed_completion(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [batch([T]), batch([tiny.END_ID], STOP)]
    chunks = [
        chunk["choices"][0] for chunk in await events(http, COMPLETIONS, completion(return_token_ids=True))
    ]
    assert chunks[0]["prompt_token_ids"] == [5, 6]
    assert [id_ for chunk in chunks for id_ in chunk["token_ids"]] == [T, tiny.END_ID]


async def test_lines_stay_lines(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    """Line separators of every kind inside a text must not end a line of the event stream."""
    text = "a\nb\r\nc\u2028d\u2029e\x85f\x0bg"
    backend.script = lambda _: [batch(tiny.ids(text), LENGTH)]
    reply = await http.post(CHAT, json=chat(stream=True))
    contents = [
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
        for line in reply.text.splitlines()
        if line.startswith("data: {")
    ]
    assert "".join(contents) == text


async def test_tokens_of_half_a_character_have_their_bytes(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    ids = tiny.byte_level().convert_tokens_to_ids(list("ðŁĺ"))
    backend.script = lambda _: [batch(ids, LENGTH, top=0)]
    (choice,) = (await http.post(CHAT, json=chat(logprobs=True))).json()["choices"]
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xF0], [0x9F], [0x98]]
    assert choice["logprobs"]["content"][0]["token"] == "\\xf0"
    assert choice["message"]["content"] == "\ufffd"


async def test_an_impossible_token_is_still_json(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    from baton.rooms.request import Token

    never = Token(T, float("-inf"), ((FOX, float("-inf")),))
    backend.script = lambda _: [TokenBatch((never,), LENGTH)]
    (choice,) = (await http.post(COMPLETIONS, json=completion(logprobs=1))).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
