"""Tests that every invalid request gets an error in OpenAI's shape that names the field, and reaches no
backend."""

import asyncio
import gzip
import json
from typing import Any, Final

import httpx
import pytest
from pydantic import ValidationError

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.errors import ApiError
from baton.api.http.middleware import ApiMiddleware
from baton.api.http.request_bodies import parse
from baton.api.requests.meaning_reader import chat_meaning
from baton.api.requests.request_builder import admit
from baton.api.requests.schemas import ChatRequest, Shape
from baton.api.requests.token_requests import DetokenizeRequest, TokenizeRequest
from baton.api.settings import ApiSettings
from baton.rooms.request import LOGIT_BIAS_MAX
from tests.api import tiny
from tests.api.scripted import LIMITS, ScriptedBackend

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
VOCABULARY = tiny.model().vocabulary


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": tiny.MODEL, "messages": [USER], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": tiny.MODEL, "prompt": "hi", **fields}


def check(reply: httpx.Response, status: int, param: str | None, code: str | None = None) -> str:
    """Check that the reply is this error in its API's shape, and return its message."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param, body
    if code is not None:
        assert body["error"]["code"] == code
    message: str = body["error"]["message"]
    assert message
    too_long = body["error"]["code"] == "context_length_exceeded"
    assert message.startswith("This model's maximum context length is ") == too_long
    return message


CHAT_FAULTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": []}, "messages", None),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"model": 5}, "model", "invalid_type"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [USER, {"role": "wizard", "content": "hi"}]}, "messages[1].role", "invalid_value"),
    ({"messages": [{"role": "function", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content", None),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        None,
    ),
    ({"messages": [{**USER, "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function", None),
    ({"messages": [{**USER, "colour": "red"}]}, "messages[0].colour", "unknown_parameter"),
    ({"messages": [{"role": "user", "content": "REFUSE"}]}, "messages", None),
    ({"messages": [{"role": "user", "content": "long " * 600}]}, "messages", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"max_tokens": -1}, "max_tokens", None),
    ({"max_tokens": 10**9}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 10**30}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 5.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", None),
    ({"min_tokens": -1}, "min_tokens", None),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", None),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", None),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", None),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"temperature": -0.1}, "temperature", None),
    ({"temperature": 2.1}, "temperature", None),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", None),
    ({"top_p": 1.1}, "top_p", None),
    ({"top_k": -2}, "top_k", None),
    ({"min_p": 1.5}, "min_p", None),
    ({"repetition_penalty": 0}, "repetition_penalty", None),
    ({"presence_penalty": 3}, "presence_penalty", None),
    ({"frequency_penalty": -3}, "frequency_penalty", None),
    ({"seed": 2**63}, "seed", None),
    ({"stop": ["a"] * 33}, "stop", None),
    ({"stop": [1] * 1000}, "stop[0]", "invalid_type"),
    ({"stop": ""}, "stop", None),
    ({"stop": ["a", ""]}, "stop[1]", None),
    ({"stop": ["a", 5]}, "stop[1]", "invalid_type"),
    ({"stop": ["a" * 2000]}, "stop[0]", None),
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids[0]", None),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", None),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", None),
    ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias", None),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", None),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"logit_bias": {str(each): 1 for each in range(LOGIT_BIAS_MAX + 1)}}, "logit_bias", None),
    ({"messages": [dict.fromkeys(map(str, range(200)), 1)]}, "messages[0]", None),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", None),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"reasoning_effort": "greatest"}, "reasoning_effort", None),
    ({"temprature": 1}, "temprature", "unknown_parameter"),
    ({"prompt": "hi"}, "prompt", "unknown_parameter"),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"), CHAT_FAULTS, ids=lambda value: json.dumps(value)[:60].replace("/", " ")
)
async def test_chat(
    http: httpx.AsyncClient,
    backend: ScriptedBackend,
    fields: dict[str, Any],
    param: str,
    code: str | None,
) -> None:
    message = check(await http.post(CHAT, json=chat(**fields)), 400, param, code)
    assert param.partition("[")[0].partition(".")[0] in message or param == "messages"
    assert backend.asked == []


COMPLETION_FAULTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": ""}, "prompt", None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": [[]]}, "prompt", None),
    ({"prompt": ["hi", ""]}, "prompt[1]", None),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": ["hi", 5]}, "prompt", "invalid_type"),
    ({"prompt": [1, -1]}, "prompt", "invalid_type"),
    ({"prompt": [1.5]}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": ["x"] * 65}, "prompt", None),
    ({"prompt": [1, VOCABULARY]}, "prompt[1]", None),
    ({"prompt": [[1], [2, VOCABULARY]]}, "prompt[1][1]", None),
    ({"prompt": [1] * 512}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 401}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 400, "max_tokens": 52}, "max_tokens", "context_length_exceeded"),
    ({"echo": "yes"}, "echo", "invalid_type"),
    ({"suffix": "end"}, "suffix", "unsupported_value"),
    ({"logprobs": 21}, "logprobs", None),
    ({"logprobs": True}, "logprobs", "invalid_type"),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"), COMPLETION_FAULTS, ids=lambda value: json.dumps(value)[:60]
)
async def test_completions(
    http: httpx.AsyncClient,
    backend: ScriptedBackend,
    fields: dict[str, Any],
    param: str,
    code: str | None,
) -> None:
    check(await http.post(COMPLETIONS, json=completion(**fields)), 400, param, code)
    assert backend.asked == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": NaN}', "invalid_json"),
        (b'{"temperature": Infinity}', "invalid_json"),
        (b'{"model": "tiny"} trailing', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b'{"model": "\xff"}', "invalid_utf8"),
        (b"[" * 100_000, "nested_too_deeply"),
        (b'[{"model": "tiny"}]', "invalid_type"),
        (b'"text"', "invalid_type"),
        (b"1" * 5000, "invalid_json"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_not_a_json_object(http: httpx.AsyncClient, path: str, raw: bytes, code: str) -> None:
    reply = await http.post(path, content=raw, headers={"content-type": "application/json"})
    check(reply, 400, None, code)


@pytest.mark.parametrize(("marks", "status"), [(1, 200), (2, 400)], ids=["one", "two"])
async def test_a_file_that_begins_with_a_byte_order_mark_is_json(
    http: httpx.AsyncClient, marks: int, status: int
) -> None:
    raw = b"\xef\xbb\xbf" * marks + b'{"prompt": "The fox"}'
    reply = await http.post("/tokenize", content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == status


async def test_a_number_beyond_floats(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    raw = json.dumps(chat()).replace("{", '{"temperature": 1e999, ', 1)
    reply = await http.post(CHAT, content=raw, headers={"content-type": "application/json"})
    check(reply, 400, "temperature")
    assert backend.asked == []


async def test_content_type(http: httpx.AsyncClient) -> None:
    for headers in ({"content-type": "text/plain"}, {}):
        reply = await http.post(CHAT, content=json.dumps(chat()), headers=headers)
        check(reply, 415, None, "unsupported_media_type")
    headers = {"content-type": "application/json; charset=utf-8"}
    assert (await http.post(CHAT, content=json.dumps(chat()), headers=headers)).status_code == 200


async def test_content_encoding(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    """A body with a content encoding is refused with 415, not as invalid JSON."""
    body, headers = json.dumps(chat()).encode(), {"content-type": "application/json"}
    coded = headers | {"content-encoding": "gzip"}
    reply = await http.post(CHAT, content=gzip.compress(body), headers=coded)
    check(reply, 415, None, "unsupported_content_encoding")
    assert reply.headers["accept-encoding"] == "identity"
    assert backend.asked == []
    coded = headers | {"content-encoding": "Identity"}
    assert (await http.post(CHAT, content=body, headers=coded)).status_code == 200


async def test_unknown_model_path_and_method(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert "gpt" in check(await http.post(CHAT, json=chat(model="gpt")), 404, "model", "model_not_found")
    check(await http.get("/v1/models/gpt"), 404, "model", "model_not_found")
    check(await http.post("/tokenize", json={"model": "gpt", "prompt": "x"}), 404, "model")
    check(await http.post("/v1/embeddings", json={}), 404, None, "not_found")
    check(await http.get(CHAT), 405, None, "method_not_allowed")
    check(await http.post("/v1/models", json={}), 405, None, "method_not_allowed")
    assert backend.asked == []


async def test_request_id(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    reply = await http.post(CHAT, json=chat(), headers={"X-Request-Id": "my-id.7"})
    assert (reply.status_code, reply.headers["x-request-id"]) == (200, "my-id.7")
    assert backend.asked[0].request_id == "my-id.7"
    assert reply.json()["id"] == "chatcmpl-my-id.7"
    check(await http.post(CHAT, json=chat(), headers={"X-Request-Id": "a b"}), 400, "X-Request-Id")
    check(await http.post(CHAT, json=chat(), headers={"X-Request-Id": "a" * 129}), 400, "X-Request-Id")
    assert len(backend.asked) == 1


async def test_a_large_body_over_a_socket(url: str, backend: ScriptedBackend) -> None:
    """Ten megabytes, with and without a length said beforehand: the client can read its 413."""
    body = json.dumps(completion(prompt="x" * 10 * 2**20)).encode()
    headers = {"content-type": "application/json"}

    async def in_chunks() -> Any:
        for start in range(0, len(body), 2**16):
            yield body[start : start + 2**16]

    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        check(await client.post(COMPLETIONS, content=body, headers=headers), 413, None, "request_too_large")
        reply = await client.post(COMPLETIONS, content=in_chunks(), headers=headers)
        check(reply, 413, None, "request_too_large")
    assert backend.asked == []


async def test_a_client_that_writes_all_before_it_reads_gets_its_answer(url: str) -> None:
    """Most simple clients write all before they read. If the connection were closed earlier, they would lose
    the 413."""
    size = 30 * 2**20
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode())
    for _ in range(size // 2**16):
        writer.write(b"x" * 2**16)
        await writer.drain()
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_large_body_announced_is_refused_before_it_is_sent(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 10485760\r\nExpect: 100-continue\r\n\r\n"
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.fixture
def hasty(backend: ScriptedBackend) -> ApiMiddleware:
    from prometheus_client import CollectorRegistry

    settings = ApiSettings(body_timeout_s=0.05)
    return create_app(backend, tiny.model(), CollectorRegistry(), settings)


async def test_a_body_that_does_not_come(hasty: ApiMiddleware, backend: ScriptedBackend) -> None:
    async def never() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(hasty), base_url="http://test") as client:
        reply = await client.post(CHAT, content=never(), headers={"content-type": "application/json"})
    check(reply, 408, None, "request_timeout")
    assert backend.asked == []


MANY = 10_000
WRONG: Final[dict[str, tuple[type[Shape], dict[str, Any]]]] = {
    "stop": (ChatRequest, chat(stop=[1] * MANY)),
    "stop_token_ids": (ChatRequest, chat(stop_token_ids=["a"] * MANY)),
    "logit_bias": (ChatRequest, chat(logit_bias=dict.fromkeys(map(str, range(MANY)), "a"))),
    "messages": (ChatRequest, chat(messages=[1] * MANY)),
    "a message": (ChatRequest, chat(messages=[dict.fromkeys(map(str, range(MANY)), 1)])),
    "stream_options": (ChatRequest, chat(stream_options=dict.fromkeys(map(str, range(MANY)), 1))),
    "to tokenize": (TokenizeRequest, {"messages": [1] * MANY}),
    "to detokenize": (DetokenizeRequest, {"tokens": ["a"] * MANY}),
}


@pytest.mark.parametrize("what", WRONG)
def test_of_much_that_is_wrong_little_is_collected(what: str) -> None:
    """Megabytes of errors would delay every other request for seconds, and take gigabytes."""
    shape, body = WRONG[what]
    with pytest.raises(ValidationError) as found:
        shape.model_validate(body)
    assert found.value.error_count() <= 2
    with pytest.raises(ApiError):
        parse(json.dumps(body).encode(), shape)


async def test_a_body_of_very_many_fields(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    body = chat(**dict.fromkeys(map(str, range(MANY)), 1))
    assert "10002 fields" in check(await http.post(CHAT, json=body), 400, None)
    assert backend.asked == []


async def test_a_field_with_a_very_long_name(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    name = "k" * 10**6
    for body in (chat(**{name: 1}), chat(messages=[USER | {name: 1}]), chat(logit_bias={name: 1})):
        reply = await http.post(CHAT, json=body)
        assert reply.json()["error"]["message"]
        assert (reply.status_code, len(reply.content) < 1000) == (400, True)
    assert backend.asked == []


async def test_one_bad_prompt_of_several_keeps_all_out(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    check(await http.post(COMPLETIONS, json=completion(prompt=[[1], [1] * 500])), 400, "prompt[1]")
    assert backend.asked == []


@pytest.mark.parametrize(
    ("limits", "prompt", "most"),
    [
        (LIMITS, 100, 351),  # the decode cache: 450 positions, the last token needs none
        (Limits(512, 0, 0), 100, 412),  # no worker known: the context
        (Limits(512, 10_000, 10_000), 511, 1),
        (Limits(512, 400, 450, alone_tokens=450), 420, 31),  # a decode worker computes it
    ],
)
async def test_the_most_tokens_that_fit(
    http: httpx.AsyncClient, backend: ScriptedBackend, limits: Limits, prompt: int, most: int
) -> None:
    backend.known_limits = limits
    body = completion(prompt=[1] * prompt, max_tokens=most)
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200
    body["max_tokens"] += 1
    check(await http.post(COMPLETIONS, json=body), 400, "max_tokens", "context_length_exceeded")
    assert [request.max_tokens for request in backend.asked] == [most]


@pytest.mark.parametrize(
    ("limits", "prompt", "fields", "most"),
    [
        (Limits(512, 0, 0), 100, {}, 412),  # no worker is known: the context
        (Limits(512, 400, 4500), 100, {}, 412),
        (Limits(512, 400, 450), 100, {}, 351),  # the largest cache holds less than the context
        (Limits(512, 400, 450), 400, {}, 51),
        (Limits(512, 400, 450), 100, {"min_tokens": 80}, 351),
        (Limits(512, 400, 450), 100, {"max_tokens": 30}, 30),
        (Limits(512, 400, 450, 120), 100, {}, 21),  # the larger worker gets no requests now
        (Limits(512, 400, 450, 120), 200, {}, 251),  # and is waited for where no other holds the prompt
        (Limits(512, 400, 450, 120), 100, {"max_tokens": 300}, 300),
    ],
)
def test_an_answer_without_an_end_may_be_as_long_as_the_context_leaves(
    limits: Limits, prompt: int, fields: dict[str, Any], most: int
) -> None:
    body = ChatRequest(**chat(**fields))
    (request,) = admit(body, chat_meaning(body), [[1] * prompt], tiny.model(), limits, "r", salt=0)
    assert request.max_tokens == most


async def test_a_prompt_that_neither_side_can_compute_is_refused_and_why(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.known_limits = Limits(512, 400, 480, alone_tokens=450)
    answer = await http.post(COMPLETIONS, json=completion(prompt=[1] * 460))
    check(answer, 400, "prompt", "context_length_exceeded")
    told = "the prefill workers' caches hold 400, those of decode workers that compute prompts 450"
    assert told in answer.json()["error"]["message"]
    scored = completion(prompt=[1] * 420, prompt_logprobs=1)
    check(await http.post(COMPLETIONS, json=scored), 400, "prompt", "context_length_exceeded")


async def test_harmless_fields_are_taken(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    harmless = chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=True,
        safety_identifier="x",
        n=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        max_tokens=None,
        stop=None,
        logit_bias=None,
    )
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    earlier: dict[str, Any] = {
        "role": "assistant",
        "content": "ok",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "parsed": {"as": "its client read it"},
        "reasoning_content": None,  # other servers' replies
    }
    harmless["messages"] = [{"role": "developer", "content": parts}, earlier, USER]
    assert (await http.post(CHAT, json=harmless)).status_code == 200
    text = tiny.model().tokenizer.decode(backend.asked[0].prompt, skip_special_tokens=False)
    assert text.startswith("<|start|>system\none two<|end|>\n<|start|>assistant\nok<|end|>\n")
