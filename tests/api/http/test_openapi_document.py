"""Tests of `/openapi.json`, compared with real bodies, answers and errors."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
from fastapi.openapi.models import OpenAPI
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.requests.unsupported_fields import HARMLESS, IGNORED
from baton.rooms.request import Request
from tests.api.chat.test_reasoning import REASONED, THINKING, served
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS
from tests.api.scripted import ScriptedBackend, Step, saying
from tests.api.test_api_page import PAGE

HELLO: Final = [{"role": "user", "content": "Hi"}]
WEATHER: Final = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
CALL: Final = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLING: Final = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
LOGPROBS: Final = "message.output_text.logprobs"
MESSAGE: Final = {"model": "tiny", "messages": HELLO, "max_tokens": 60}
NOW: Final = {"name": "now", "input_schema": {"type": "object"}}
FUNCTION: Final = {"type": "function", "name": "now", "parameters": {"type": "object"}}
BEFORE_ANY_ROUTE: Final = {405, 414, 431, 501}
OF_OPERATORS: Final = {403}
"""Statuses of operators' pages, which this document does not have."""

GOOD: Final[list[tuple[str, dict[str, Any]]]] = [
    (CHAT, {"messages": HELLO}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stop": "a"}),
    (CHAT, {"messages": HELLO, "stop": ["a", "b"], "seed": -1, "logit_bias": {"5": -100}, "user": "me"}),
    (CHAT, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 4.0}),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    (
        CHAT,
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "cold"},
            ]
        },
    ),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text"}, "cache_salt": "x", "request_id": "r-1"}),
    (CHAT, {"messages": HELLO, "use_beam_search": False, "length_penalty": 1.0, "metadata": {"a": "b"}}),
    (COMPLETIONS, {"prompt": "Hi"}),
    (COMPLETIONS, {"prompt": ["Hi", "Ho"], "logprobs": 1, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": [1, 2]}),
    (COMPLETIONS, {"prompt": [[1], [2, 3]], "allowed_token_ids": [4], "truncate_prompt_tokens": -1}),
    (MESSAGES, MESSAGE),
    (MESSAGES, MESSAGE | {"system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]}),
    (MESSAGES, MESSAGE | {"tools": [NOW], "tool_choice": {"type": "tool", "name": "now"}}),
    (MESSAGES, MESSAGE | {"thinking": {"type": "adaptive"}, "metadata": {}, "speed": "standard"}),
    (RESPONSES, {"input": "Hi", "metadata": {"a": "b"}, "text": {"format": {"type": "text"}}}),
    (RESPONSES, {"input": "Hi", "include": [LOGPROBS], "top_logprobs": 2, "temperature": 0.5}),
    (
        RESPONSES,
        {
            "input": [{"type": "message", **HELLO[0]}],
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "name": "now"},
        },
    ),
    (f"{RESPONSES}/input_tokens", {"input": "Hi"}),
    (f"{MESSAGES}/count_tokens", {"model": "tiny", "messages": HELLO}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [1, 2]}),
]
WRONG: Final[list[tuple[str, dict[str, Any]]]] = [
    (CHAT, {}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "robot", "content": "Hi"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, {"messages": HELLO, "temperature": 3}),
    (CHAT, {"messages": HELLO, "temprature": 1}),
    (CHAT, {"messages": HELLO, "tool_choice": "maybe"}),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}),
    (CHAT, {"messages": HELLO, "use_beam_search": True}),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}),
    (CHAT, {"messages": HELLO, "request_id": "a b"}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": [1, "a"]}),
    (COMPLETIONS, {"prompt": "Hi", "stop": [""]}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 1}),
    (MESSAGES, MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    (MESSAGES, MESSAGE | {"speed": "fast"}),
    (RESPONSES, {}),
    (RESPONSES, {"input": "Hi", "temperature": 3}),
    ("/detokenize", {"tokens": [-1]}),
]


@pytest.fixture
async def told(http: httpx.AsyncClient) -> dict[str, Any]:
    document: dict[str, Any] = (await http.get("/openapi.json")).json()
    return document


def judge(told: dict[str, Any], schema: dict[str, Any], *, strict: bool = False) -> Draft202012Validator:
    """Return a validator for `schema` with the document's components. `strict`: refuse fields that the
    document does not name."""
    shapes = told["components"]
    if strict:
        shapes = json.loads(json.dumps(shapes))
        for each in shapes["schemas"].values():
            if "properties" not in each:
                continue
            each.setdefault("additionalProperties", False)
    return Draft202012Validator({**schema, "components": shapes})


def taken(told: dict[str, Any], path: str) -> Draft202012Validator:
    return judge(told, told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


def answered(told: dict[str, Any], path: str, status: int, method: str = "post", events: bool = False) -> Any:
    content = told["paths"][path][method]["responses"][str(status)]["content"]
    kind = "text/event-stream" if events else "application/json"
    return judge(told, content[kind]["schema"], strict=True)


def operations(told: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


async def test_it_is_a_document_of_openapi_whose_references_all_lead_somewhere(told: dict[str, Any]) -> None:
    assert told["openapi"].startswith("3.1")
    OpenAPI.model_validate(told)
    for name, schema in told["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert "$defs" not in schema, name
    referred = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(told)))
    assert referred == {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}
    named = [operation["operationId"] for _, _, operation in operations(told)]
    assert len(named) == len(set(named))


async def test_every_status_of_the_page_is_told_and_no_other(told: dict[str, Any]) -> None:
    rows = re.findall(r"^\| (\d{3}(?:, \d{3})*) \|", PAGE, re.MULTILINE)
    page = {int(status) for row in rows for status in row.split(", ")} - BEFORE_ANY_ROUTE - OF_OPERATORS
    found = {int(status) for _, _, operation in operations(told) for status in operation["responses"]}
    assert found == page | {200}


async def test_every_route_that_takes_a_body_tells_its_shape_and_every_one_its_errors(
    told: dict[str, Any],
) -> None:
    for path, method, operation in operations(told):
        assert ("requestBody" in operation) == (method == "post"), path
        assert {"400", "401", "429", "500"} <= set(operation["responses"]), path
        for status, response in operation["responses"].items():
            if status >= "400":
                assert "$ref" in response["content"]["application/json"]["schema"], (path, status)


@pytest.mark.parametrize(("path", "body"), GOOD)
async def test_what_is_told_to_be_taken_is_taken_and_answered_as_it_is_told(
    http: httpx.AsyncClient, backend: ScriptedBackend, told: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    taken(told, path).validate(body)
    backend.known_limits = Limits(context_tokens=2048, prompt_tokens=2048, sequence_tokens=2048)
    backend.script = _alike
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    answered(told, path, 200).validate(reply.json())
    if "token" in path:
        return
    more: dict[str, Any] = {"stream": True}
    if path in (CHAT, COMPLETIONS):
        more["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    streamed = await http.post(path, json=body | more)
    events = re.findall(r"^data: (.*)$", streamed.text, re.MULTILINE)
    if path in (CHAT, COMPLETIONS):
        assert events.pop() == "[DONE]"
    for event in events:
        answered(told, path, 200, events=True).validate(json.loads(event))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO}),
        (MESSAGES, MESSAGE | {"thinking": {"type": "adaptive"}}),
        (RESPONSES, {"input": "Hi"}),
        (RESPONSES, {"input": "Hi", "include": ["reasoning.encrypted_content"]}),
        (RESPONSES, {"input": "Hi", "reasoning": {"summary": "auto"}}),
    ],
)
async def test_reasoning_is_answered_as_it_is_described(
    backend: ScriptedBackend, told: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    backend.script = lambda _: saying(REASONED)
    app = create_app(backend, served(THINKING), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        whole = await http.post(path, json=body)
        streamed = await http.post(path, json=body | {"stream": True})
    assert '"Hm, they ask."' in whole.text
    answered(told, path, 200).validate(whole.json())
    events = re.findall(r"^data: (\{.*)$", streamed.text, re.MULTILINE)
    assert len(events) > 5
    for event in events:
        answered(told, path, 200, events=True).validate(json.loads(event))


def _alike(request: Request) -> list[Step]:
    text = CALLING if request.grammar is not None else "Hello world"
    return saying(text, top=request.sampling.top_logprobs)


@pytest.mark.parametrize(("path", "body"), WRONG)
async def test_what_is_told_to_be_refused_is_refused_as_it_is_told(
    http: httpx.AsyncClient, told: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    assert not taken(told, path).is_valid(body)
    reply = await http.post(path, json=body)
    assert reply.status_code == 400
    answered(told, path, 400).validate(reply.json())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/version"])
async def test_what_is_read_is_as_it_is_told(
    http: httpx.AsyncClient, told: dict[str, Any], path: str
) -> None:
    reply = await http.get(path.format(name="tiny"))
    answered(told, path, 200, "get").validate(reply.json())
    other = await http.get("/v1/models/other")
    answered(told, "/v1/models/{name}", 404, "get").validate(other.json())


async def test_what_has_no_effect_is_told_as_taken(told: dict[str, Any]) -> None:
    fields = told["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(fields) >= IGNORED | set(HARMLESS)
    assert fields["do_sample"]["enum"] == [None, True]
