"""Tests that random JSON gets a reply or a 4xx in the shape of its API, and never a 5xx."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from baton.api.http.middleware import ApiMiddleware
from baton.api.messages.message_request import MessagesRequest
from baton.api.requests.schemas import ChatRequest, CompletionRequest
from baton.api.requests.token_requests import DetokenizeRequest, TokenizeRequest
from baton.api.requests.unsupported_fields import HARMLESS, IGNORED
from baton.api.responses.response_request import ResponsesRequest
from tests.api import tiny
from tests.api.scripted import ScriptedBackend

FIXTURES_STAY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
"""The application keeps nothing from one example to the next, but for what `judge` clears."""

SHAPES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
NAMES = sorted({*IGNORED, *HARMLESS, *(name for shape in SHAPES.values() for name in shape.model_fields)})

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.integers(-2, 25)
    | st.floats()
    | st.text(max_size=12)
    | st.text(st.characters(), max_size=3)  # halves of surrogate pairs, too
    | st.sampled_from(["\0", "x" * 5000, 10**400, 2**63, 2**64, -(2**63) - 1, 1e308, 5e-324]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=6) | st.sampled_from(["type", "text", "role", "content"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
BLOCK = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "redacted_thinking"])
        | JSON
    },
    optional={
        "text": st.text() | JSON,
        "thinking": st.text() | JSON,
        "id": st.just("a") | JSON,
        "tool_use_id": st.just("a") | JSON,
        "name": st.just("f") | JSON,
        "input": st.just({}) | JSON,
        "content": st.text() | JSON,
        "is_error": st.booleans() | JSON,
    },
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "developer", "tool"]) | JSON,
        "content": st.text() | st.lists(BLOCK, max_size=3) | JSON,
    },
    optional={"name": JSON, "tool_calls": JSON},
)
TEXTS = st.text() | st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["input_text", "output_text", "refusal", "x"]), "text": st.text()}
    ),
    max_size=2,
)
KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | JSON},
    optional={
        "role": st.sampled_from(["user", "system", "assistant", "developer"]) | JSON,
        "content": TEXTS | JSON,
        "call_id": st.sampled_from(["a", "b"]) | JSON,
        "name": st.just("f") | JSON,
        "arguments": st.just("{}") | JSON,
        "output": TEXTS | JSON,
        "summary": st.just([]) | JSON,
        "encrypted_content": st.just("baton1.AAAA") | JSON,
        "id": st.just("msg_" + "0" * 32 + "_0") | JSON,
    },
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just(tiny.MODEL),
    "max_tokens": st.integers(1, 9),
    "system": st.text() | st.lists(BLOCK, max_size=2),
    "input": st.text() | st.lists(ITEM, min_size=1, max_size=3),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "prompt": st.text(min_size=1)
    | st.lists(st.integers(0, 450), min_size=1)
    | st.lists(st.text(), max_size=3),
    "tokens": st.lists(st.integers(-1, 450)),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=18),
    "logit_bias": st.dictionaries(st.integers(-1, 450).map(str) | st.text(max_size=3), st.floats(-101, 101)),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """Draw a mostly plausible request: the required fields and some others, each sometimes invalid."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    required = [name for name, field in SHAPES[path].model_fields.items() if field.is_required()]
    names = {*required, *draw(st.lists(st.sampled_from(NAMES), max_size=4))}
    if path == "/tokenize":
        names.add("prompt")
    body: dict[str, Any] = {}
    for name in sorted(names):
        spoilt = draw(st.integers(0, 9)) == 0
        body[name] = draw(JSON if spoilt or name not in LIKELY else LIKELY[name])
    return body


def exchange(
    app: ApiMiddleware, path: str, raw: bytes, content_type: str = "application/json"
) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=raw, headers={"content-type": content_type})

    return asyncio.run(post())


def judge(reply: httpx.Response, backend: ScriptedBackend) -> None:
    """Check that the reply is an answer, or a refusal in its API's shape that the pipeline did not see."""
    asked = len(backend.asked)
    backend.asked.clear()
    if reply.status_code == 200:
        if reply.headers["content-type"] == "application/json":
            assert reply.json() is not None
        return
    assert 400 <= reply.status_code < 500, reply.text
    assert asked == 0, "refused, and in the pipeline all the same"
    told = reply.json()
    error = told["error"]
    assert error["message"]
    assert len(error["message"]) < 2000
    if reply.url.path.startswith("/v1/messages"):
        assert (told["type"], told["request_id"]) == ("error", reply.headers["request-id"])
        assert set(error) == {"type", "message", "details"}
        return
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] is None or isinstance(error["param"], str)


@pytest.mark.parametrize("path", SHAPES)
@FIXTURES_STAY
@given(data=st.data())
def test_never_a_5xx(app: ApiMiddleware, backend: ScriptedBackend, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))
    judge(exchange(app, path, json.dumps(body).encode()), backend)


PLAUSIBLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": tiny.MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": tiny.MODEL, "prompt": "hi"},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": []}]},
    "/v1/messages": {"model": tiny.MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    1e300,
    "",
    "x",
    "\ud800",
    [],
    [None],
    [[]],
    [[[]]],
    {},
    {"": {}},
]


@pytest.mark.parametrize(
    ("path", "field"),
    [(path, field) for path, shape in SHAPES.items() for field in sorted(shape.model_fields)],
)
def test_a_wrong_type_in_any_field_is_served_or_refused_by_name(
    app: ApiMiddleware, backend: ScriptedBackend, path: str, field: str
) -> None:
    for value in ODD:
        reply = exchange(app, path, json.dumps({**PLAUSIBLE[path], field: value}).encode())
        judge(reply, backend)
        if reply.status_code in (400, 422):
            error = reply.json()["error"]
            param = error.get("param")
            silent = "param" in error or value == "\ud800"  # which is no JSON
            assert field in error["message"] or (silent and (param is None or param.startswith(field)))


def nested(opening: bytes, depth: int, closing: bytes) -> bytes:
    return opening * depth + b"0" + closing * depth


RAW = {
    "nothing": b"",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"model": "x"}'.encode("utf-16"),
    "lists in lists": b'{"messages": ' + nested(b"[", 50_000, b"]") + b"}",
    "objects in objects": nested(b'{"a":', 50_000, b"}"),
    "lists that do not end": b"[" * 200_000,
    "a number of a million digits": b'{"max_tokens": ' + b"9" * 1_000_000 + b"}",
    "an exponent": b'{"temperature": 1e999999}',
    "not a number": b'{"temperature": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "half a pair": b'{"model": "\\ud800"}',
    "an escape cut off": b'{"model": "\\u12',
    "a control character": b'{"model": "\x00"}',
    "something behind": b'{"model": "x"} {}',
    "a comment": b'/* hi */ {"model": "x"}',
    "single quotes": b"{'model': 'x'}",
    "a form": b"model=x&prompt=y",
}


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("name", RAW)
def test_what_is_no_json_of_ours_is_refused(
    app: ApiMiddleware, backend: ScriptedBackend, path: str, name: str
) -> None:
    reply = exchange(app, path, RAW[name])
    judge(reply, backend)
    assert reply.status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_of_two_values_of_one_key_the_judged_one_is_the_served_one(
    app: ApiMiddleware, backend: ScriptedBackend, path: str
) -> None:
    whole = json.dumps(PLAUSIBLE[path])[1:]
    for first, second in ((-1, 5), (5, -1)):
        raw = f'{{"max_tokens": {first}, "max_tokens": {second}, {whole}'.encode()
        reply = exchange(app, path, raw)
        tokens = [request.max_tokens for request in backend.asked]
        assert tokens == ([5] if reply.status_code == 200 else [])
        judge(reply, backend)


@pytest.mark.parametrize("path", SHAPES)
@FIXTURES_STAY
@given(data=st.data())
def test_a_damaged_body_is_served_or_refused(
    app: ApiMiddleware, backend: ScriptedBackend, path: str, data: st.DataObject
) -> None:
    raw = bytearray(json.dumps(PLAUSIBLE[path]).encode())
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), min_size=1, max_size=4)
    ):
        raw[place] = value
    cut = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))
    judge(exchange(app, path, bytes(raw[:cut])), backend)


@FIXTURES_STAY
@given(
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)
    | st.sampled_from(
        ["application/json;charset=x", " APPLICATION/JSON ", "a/b+json", "text/json", ";", "json"]
    )
)
def test_any_content_type_is_json_or_refused(app: ApiMiddleware, backend: ScriptedBackend, kind: str) -> None:
    reply = exchange(app, "/tokenize", b'{"prompt": "hi"}', kind)
    judge(reply, backend)
    media_type = kind.partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or media_type.endswith("+json")
    assert reply.status_code == (200 if is_json else 415)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(PLAUSIBLE["/v1/completions"]).encode()
CUT = {
    "in the head": HEAD[:40],
    "before the body": HEAD + b"Content-Length: 1000\r\n\r\n",
    "in the body": HEAD + b"Content-Length: 1000\r\n\r\n" + BODY,
    "in a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n" + BODY,
    "between chunks": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + f"{len(BODY):x}\r\n".encode()
    + BODY
    + b"\r\n",
    "with a chunk of nonsense": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY,
    "with a length of nonsense": HEAD + b"Content-Length: -5\r\n\r\n" + BODY,
    "with two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    "after noise": bytes(range(256)) * 16,
}


@pytest.mark.parametrize("where", CUT)
async def test_a_body_that_is_cut_off_never_enters(url: str, backend: ScriptedBackend, where: str) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(CUT[where])
    writer.write_eof()
    said = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert said == b"" or said.split()[1].startswith(b"4"), said
    assert backend.asked == []
    async with httpx.AsyncClient(base_url=url) as client:
        reply = await client.post("/v1/completions", json=PLAUSIBLE["/v1/completions"])
    assert reply.status_code == 200
