"""Tests of the fields that coding agents and platforms send beside those of an API."""

import json
from typing import Any, Final

import httpx
import pytest

from baton.api.backend import Limits
from baton.api.requests.field_types import STOP_STRINGS_MAX
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS, USER, check
from tests.api.scripted import LENGTH, ScriptedBackend, saying

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASKED: Final[dict[str, dict[str, Any]]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"model": tiny.MODEL, "max_tokens": 50, "messages": [USER]},
}
NOW: Final = {"type": "function", "name": "now", "parameters": {"type": "object"}}
APPLY: Final = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}}
SEARCH: Final = {"type": "web_search", "external_web_access": False}
DROPPED: Final = "x-baton-dropped-tools"
CODEX: Final = {"originator": "codex_cli_rs"}


@pytest.fixture(autouse=True)
def _room_for_tools(backend: ScriptedBackend) -> None:
    backend.known_limits = Limits(context_tokens=8192, prompt_tokens=8000, sequence_tokens=8192)


def prompt(backend: ScriptedBackend) -> str:
    return tiny.model().tokenizer.decode(backend.asked[-1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize("path", ASKED)
async def test_many_stop_strings_are_taken_by_every_api(http: httpx.AsyncClient, path: str) -> None:
    assert STOP_STRINGS_MAX == 32
    stops = [f"stop {each}" for each in range(STOP_STRINGS_MAX)]
    name = "stop_sequences" if path == MESSAGES else "stop"
    assert (await http.post(path, json={**ASKED[path], name: stops})).status_code == 200
    assert (await http.post(path, json={**ASKED[path], name: [*stops, "x"]})).status_code == 400


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_as_many_tools_as_agents_bring_are_taken(
    http: httpx.AsyncClient, backend: ScriptedBackend, path: str
) -> None:
    backend.known_limits = Limits(context_tokens=2**17, prompt_tokens=2**17, sequence_tokens=2**17)
    names = [f"tool_{each}" for each in range(200)]
    shapes: dict[str, Any] = {
        CHAT: [{"type": "function", "function": {"name": name}} for name in names],
        RESPONSES: [{"type": "function", "name": name} for name in names],
        MESSAGES: [{"name": name, "input_schema": {"type": "object"}} for name in names],
    }
    reply = await http.post(path, json={**ASKED[path], "tools": shapes[path]})
    assert reply.status_code == 200, reply.text
    assert "tool_199" in prompt(backend)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "now"},
        {"type": "function", "function": {"name": "now"}},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "now"}]},
        },
    ],
)
async def test_a_choice_is_taken_in_the_shape_of_either_api_of_openais(
    http: httpx.AsyncClient, choice: dict[str, Any]
) -> None:
    body = {**ASKED[CHAT], "tools": [{"type": "function", "function": {"name": "now"}}]}
    assert (await http.post(CHAT, json={**body, "tool_choice": choice})).status_code == 200
    reply = await http.post(RESPONSES, json={**ASKED[RESPONSES], "tools": [NOW], "tool_choice": choice})
    assert reply.status_code == 200, reply.text


async def test_labels_of_any_length_are_taken_as_in_a_chat(http: httpx.AsyncClient) -> None:
    labels = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "x" * 2000)
    for path in (CHAT, RESPONSES):
        assert (await http.post(path, json={**ASKED[path], **labels})).status_code == 200
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert (await http.post(RESPONSES, json={"input": "hi", "text": {"format": schema}})).status_code == 200


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "max"])
async def test_an_effort_of_openais_is_one_of_anthropics(http: httpx.AsyncClient, effort: str) -> None:
    body = {**ASKED[MESSAGES], "output_config": {"effort": effort}}
    assert (await http.post(MESSAGES, json=body)).status_code == 200


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
async def test_a_truncation_is_taken_while_nothing_need_be_dropped(
    http: httpx.AsyncClient, backend: ScriptedBackend, truncation: str
) -> None:
    reply = await http.post(RESPONSES, json={"input": "hi", "truncation": truncation})
    assert reply.json()["truncation"] == truncation
    backend.known_limits = Limits(context_tokens=64, prompt_tokens=64, sequence_tokens=64)
    reply = await http.post(RESPONSES, json={"input": "long " * 100, "truncation": truncation})
    message = check(reply, 400, "input", "context_length_exceeded")
    assert ("'truncation' \"auto\" drops nothing" in message) == (truncation == "auto")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [CODEX, {"user-agent": "codex_exec/0.9 (Linux)"}])
async def test_codex_is_answered_without_the_tools_that_are_not_served(
    http: httpx.AsyncClient, backend: ScriptedBackend, headers: dict[str, str], stream: bool
) -> None:
    space = {"type": "namespace", "name": "files", "description": "Files.", "tools": [NOW, APPLY]}
    body = {"input": "hi", "tools": [NOW, APPLY, SEARCH, space], "stream": stream}
    reply = await http.post(RESPONSES, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers[DROPPED] == "custom apply_patch, web_search, custom apply_patch"
    assert "files__now" in prompt(backend)
    assert "apply_patch" not in prompt(backend)
    if not stream:
        told = [[NOW["name"]], ["now"]]
        tools = reply.json()["tools"]
        assert [[tools[0]["name"]], [each["name"] for each in tools[1]["tools"]]] == told


async def test_a_tool_is_left_out_where_its_caller_says_that_it_may_be(http: httpx.AsyncClient) -> None:
    tools = [NOW, {**SEARCH, "optional": True}, {"type": "a,b\né", "optional": True}]
    reply = await http.post(RESPONSES, json={"input": "hi", "tools": tools})
    assert (reply.status_code, reply.headers[DROPPED]) == (200, "web_search, a?b??")
    reply = await http.post(RESPONSES, json={"input": "hi", "tools": [*tools, SEARCH]})
    refusal = check(reply, 400, "tools[3].type")
    assert "it has to be 'function' or 'namespace', unless the tool has 'optional' as true" in refusal
    assert DROPPED not in reply.headers
    forced = {"input": "hi", "tools": tools[1:], "tool_choice": "required"}
    check(await http.post(RESPONSES, json=forced), 400, "tool_choice")
    assert DROPPED not in (await http.post(RESPONSES, json={"input": "hi", "tools": [NOW]})).headers


async def test_tools_of_an_item_are_tools(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    later = {**NOW, "name": "later"}
    more = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [NOW, later, APPLY]}
    body = {"input": [more, USER], "tools": [NOW]}
    check(await http.post(RESPONSES, json=body), 400, "input[0].tools[2].type")
    reply = await http.post(RESPONSES, json=body, headers=CODEX)
    assert reply.status_code == 200, reply.text
    assert prompt(backend).count('"name": "now"') == prompt(backend).count('"name": "later"') == 1
    changed = {**more, "tools": [{**NOW, "description": "Another."}]}
    reply = await http.post(RESPONSES, json={"input": [changed, USER], "tools": [NOW]})
    check(reply, 400, "input[0].tools[0].name")


@pytest.mark.parametrize(
    "path", [f"{CHAT}/", f"/{CHAT}", "/v1//chat/completions", "//v1/chat//completions//"]
)
async def test_a_path_with_a_slash_too_many_is_the_one_without(http: httpx.AsyncClient, path: str) -> None:
    reply = await http.request(
        "POST", httpx.URL("http://test").copy_with(raw_path=path.encode()), json=ASKED[CHAT]
    )
    assert reply.status_code == 200, reply.text
    assert (await http.get("/v1/models/")).json()["object"] == "list"
    assert (await http.post(f"{MESSAGES}/", json={})).json()["type"] == "error"


async def test_tokens_are_counted_below_v1_too(http: httpx.AsyncClient) -> None:
    told = (await http.post("/v1/tokenize", json={"prompt": "The fox"})).json()
    assert told == (await http.post("/tokenize", json={"prompt": "The fox"})).json()
    text = await http.post("/v1/detokenize", json={"tokens": told["tokens"]})
    assert text.json() == {"prompt": "The fox"}


async def test_a_root_says_that_a_server_is_there(http: httpx.AsyncClient) -> None:
    assert (await http.head("/")).status_code == 200
    assert (await http.get("/")).json()["api"] == "/v1"


@pytest.mark.parametrize(
    ("body", "kind"),
    [({"messages": [USER]}, "chat.completion"), ({"prompt": "hi"}, "text_completion")],
)
async def test_an_invocation_is_a_chat_or_a_completion(
    http: httpx.AsyncClient, body: dict[str, Any], kind: str
) -> None:
    assert (await http.post("/invocations", json=body)).json()["object"] == kind
    streamed = await http.post("/invocations", json={**body, "stream": True})
    first = json.loads(streamed.text.partition("data: ")[2].partition("\n")[0])
    assert first["object"].startswith(kind)


async def test_an_invocation_without_either_says_what_is_missing(http: httpx.AsyncClient) -> None:
    check(await http.post("/invocations", json={}), 400, "messages", "missing_required_parameter")
    check(await http.post("/invocations", json={"prompt": "hi", "messages": [USER]}), 400, "prompt")


@pytest.mark.parametrize(("role", "same"), [("ctx", "system"), ("developer", "system"), ("msg", "user")])
async def test_a_role_of_claude_codes_is_one_that_anthropic_has(
    http: httpx.AsyncClient, backend: ScriptedBackend, role: str, same: str
) -> None:
    prompts = []
    for each in (role, same):
        for turns in (
            [{"role": each, "content": "Be brief."}, USER],
            [USER, {"role": each, "content": "So."}],
        ):
            reply = await http.post(MESSAGES, json={**ASKED[MESSAGES], "messages": turns})
            assert reply.status_code == 200, reply.text
            prompts.append(prompt(backend))
    assert prompts[:2] == prompts[2:]
    assert "Be brief." in prompts[0]
    assert "So." in prompts[1]


DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
RECORD: Final = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
FIELDS: Final[dict[str, Any]] = {
    "command": {"type": "string", "minLength": 2, "maxLength": 524288},
    "resume": {"type": "string", "pattern": "^wf_[a-z0-9-]{6,}$"},
    "url": {"type": "string", "format": "uri"},
    "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    "line": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    "timeout": {"type": "number", "default": 30000, "minimum": 0, "maximum": 600000},
    "status": {
        "anyOf": [{"type": "string", "enum": ["pending", "done"]}, {"type": "string", "const": "gone"}]
    },
    "blocks": {"type": "array", "maxItems": 32, "items": {"type": "string"}},
    "background": {"type": "boolean", "default": False},
    "metadata": RECORD,
}
"""A schema of each kind that the tools of Claude Code have."""


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_any_of_tools_like_claude_codes_is_called(
    http: httpx.AsyncClient, backend: ScriptedBackend, strict: bool | None, stream: bool
) -> None:
    backend.script = lambda _: saying('<tool_call>\n{"name": "limit", "arguments": {"li', finish=LENGTH)
    tools = [
        {
            "name": name,
            "input_schema": {
                "$schema": DRAFT,
                "type": "object",
                "properties": {name: schema},
                "required": [name],
                "additionalProperties": False,
            },
            "strict": strict,
        }
        for name, schema in FIELDS.items()
    ]
    body = {**ASKED[MESSAGES], "tools": tools, "tool_choice": {"type": "any"}, "stream": stream}
    reply = await http.post(MESSAGES, json=body)
    assert reply.status_code == 200, reply.text
    assert '"name":"limit"' in reply.text
    grammar = backend.asked[-1].grammar
    assert grammar is not None
    assert all(name in grammar.text for name in FIELDS)
