"""Whatever JSON comes in, the answer is a reply or a 4xx in OpenAI's shape; never a 5xx."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from services.openai.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from services.openai.unsupported import HARMLESS, IGNORED
from tests.openai import tiny

SHAPES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
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
    | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=6) | st.sampled_from(["type", "text", "role", "content"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "developer", "tool"]) | JSON,
        "content": st.text() | JSON,
    },
    optional={"name": JSON, "tool_calls": JSON},
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just(tiny.MODEL),
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
    """Mostly plausible requests: the required fields, and some others, each now and then spoilt."""
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


@pytest.mark.parametrize("path", SHAPES)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_never_a_5xx(app: FastAPI, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))
    raw = json.dumps(body).encode()

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=raw, headers={"content-type": "application/json"})

    reply = asyncio.run(post())
    assert reply.status_code == 200 or 400 <= reply.status_code < 500, reply.text
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["param"] is None or isinstance(error["param"], str)
