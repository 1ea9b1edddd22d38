"""Tests of faults in requests of the Responses API, named by the path that the sender wrote."""

import json
from typing import Any, Final

import httpx
import pytest

from baton.api.backend import Limits
from baton.api.responses.response_unsupported import HARMLESS, IGNORED
from tests.api import tiny
from tests.api.requests.test_bad_input import check
from tests.api.responses.test_responses import SPACE, WEATHER
from tests.api.scripted import ScriptedBackend

USER: Final[dict[str, Any]] = {"role": "user", "content": "hi"}
CALLED: Final[dict[str, Any]] = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
RESULT: Final[dict[str, Any]] = {"type": "function_call_output", "call_id": "a", "output": "x"}
LONG: Final = "long " * 9000
SCHEMA: Final[dict[str, Any]] = {"type": "json_schema", "name": "x", "schema": {"uniqueItems": True}}

UNHELD: Final[dict[str, Any]] = {
    **WEATHER,
    "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
}

MORE: dict[str, Any] = {"type": "additional_tools", "role": "developer"}
FAULTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": []}, "input", None),
    ({"input": LONG}, "input", "context_length_exceeded"),
    ({"input": [USER, 5]}, "input[1]", "invalid_type"),
    ({"input": [USER, {}]}, "input[1].id", "missing_required_parameter"),
    ({"input": [USER, {"content": "hi"}]}, "input[1].type", "missing_required_parameter"),
    ({"input": [{"role": "wizard", "content": "hi"}]}, "input[0].role", None),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", None),
    ({"input": [{**USER, "colour": "red"}]}, "input[0].colour", "unknown_parameter"),
    ({"input": [{**USER, "statos": "completed"}]}, "input[0].statos", "unknown_parameter"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", None),
    ({"input": [{"type": 5}]}, "input[0].type", None),
    ({"input": [USER, {**CALLED, "arguments": "{]"}]}, "input[1].arguments", None),
    ({"input": [USER, RESULT]}, "input[1].call_id", None),
    ({"input": [USER, CALLED, {**RESULT, "call_id": "b"}]}, "input[2].call_id", None),
    ({"input": [USER, {"type": "reasoning", "summary": [{}]}]}, "input[1].summary[0].type", None),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "item_not_found"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
    ({"model": "other"}, "model", "model_not_found"),
    ({"max_output_tokens": 0}, "max_output_tokens", None),
    ({"max_output_tokens": 10**9}, "max_output_tokens", "context_length_exceeded"),
    ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"documents": []}, "documents", "unsupported_parameter"),
    ({"max_new_tokens": 5}, "max_new_tokens", "unsupported_parameter"),
    ({"messages": [USER]}, "messages", "unsupported_parameter"),
    ({"response_format": {"type": "text"}}, "response_format", "unsupported_parameter"),
    ({"temprature": 1}, "temprature", "unknown_parameter"),
    ({"temperature": 3}, "temperature", None),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"top_logprobs": 21}, "top_logprobs", None),
    ({"include": ["file_search_call.results"]}, "include[0]", None),
    ({"background": True}, "background", "unsupported_value"),
    ({"truncation": "left"}, "truncation", None),
    ({"truncation": "auto", "input": LONG}, "input", "context_length_exceeded"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "x"}}, "prompt", "unsupported_parameter"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "unsupported_value"),
    ({"reasoning": {"effort": "greatest"}}, "reasoning.effort", None),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", None),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", None),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type", None),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", None),
    ({"text": {"format": SCHEMA}}, "text.format.schema", None),
    ({"tools": 5}, "tools", "invalid_type"),
    ({"tools": [5]}, "tools[0]", "invalid_type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", None),
    ({"tools": [WEATHER, {"type": "custom", "name": "x"}]}, "tools[1].type", None),
    ({"tools": [WEATHER, {"type": "custom", "name": "x", "optional": False}]}, "tools[1].type", None),
    ({"tools": [{**SPACE, "tools": [{"type": "custom", "name": "x"}]}]}, "tools[0].tools[0].type", None),
    ({"input": [MORE | {"tools": [{"type": "mcp"}]}, USER]}, "input[0].tools[0].type", None),
    ({"input": [MORE | {"tools": [{"name": "x"}]}, USER]}, "input[0].tools[0].type", None),
    ({"input": [MORE | {"tools": [WEATHER]}]}, "input", None),
    ({"tools": [{"name": "x"}]}, "tools[0].type", "missing_required_parameter"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name", None),
    ({"tools": [{**WEATHER, "name": "x y"}]}, "tools[0].name", None),
    ({"tools": [{**WEATHER, "paramters": {}}]}, "tools[0].paramters", "unknown_parameter"),
    ({"tools": [WEATHER, SPACE, SPACE]}, "tools[2].tools[0].name", None),
    ({"tools": [{**SPACE, "name": "n" * 200}]}, "tools[0].tools[0].name", None),
    (
        {
            "tools": [
                {
                    **WEATHER,
                    "strict": True,
                    "parameters": {
                        "type": "object",
                        "properties": {"a": {"type": "array", "uniqueItems": True}},
                    },
                }
            ]
        },
        "tools[0].parameters",
        None,
    ),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"tool_choice": "sometimes"}, "tool_choice", None),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", None),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice", None),
    ({"metadata": {"a": 5}}, "metadata.a", "invalid_type"),
    ({"metadata": {"a": "x" * 513}}, "metadata", None),
    ({"stream_options": {"include_usages": True}, "stream": True}, "stream_options.include_usages", None),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"store": 1}, "store", "invalid_type"),
    ({"stop": [""]}, "stop[0]", None),
    ({"min_tokens": 6, "max_output_tokens": 5}, "min_tokens", None),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", None),
    ({"instructions": LONG}, "input", "context_length_exceeded"),
]


@pytest.fixture(autouse=True)
def _room_for_tools(backend: ScriptedBackend) -> None:
    backend.known_limits = Limits(context_tokens=8192, prompt_tokens=8000, sequence_tokens=8192)


@pytest.mark.parametrize(("fields", "param", "code"), FAULTS, ids=lambda value: json.dumps(value)[:60])
async def test_a_fault_is_named(
    http: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], param: str, code: str | None
) -> None:
    reply = await http.post("/v1/responses", json={"model": tiny.MODEL, "input": "hi", **fields})
    message = check(reply, 404 if param == "model" else 400, param, code)
    assert param in message or param in ("model", "previous_response_id")
    for of_a_chat in ("messages", "max_completion_tokens", "response_format", "tool_calls"):
        assert of_a_chat not in message or of_a_chat in fields or of_a_chat in fields.get(param, ())
    assert backend.asked == []


async def test_what_changes_nothing_is_taken(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    body: dict[str, Any] = {"model": tiny.MODEL, "input": "hi", "max_tool_calls": 3, "service_tier": "auto"}
    body |= {name: values[0] for name, values in HARMLESS.items() if values} | {key: {} for key in IGNORED}
    body |= {"user": "me", "safety_identifier": "you", "prompt_cache_key": "it", "prompt": None}
    body |= {"reasoning": {"mode": "standard", "context": "auto"}, "top_logprobs": 0}
    body |= {"stream": True, "stream_options": {"include_obfuscation": True}}
    reply = await http.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    assert "obfuscation" not in reply.text
    last = json.loads(reply.text.strip().rpartition("data: ")[2])["response"]
    assert (last["user"], last["safety_identifier"], last["prompt_cache_key"]) == ("me", "you", "it")
    assert last["max_tool_calls"] == 3
    (asked,) = backend.asked
    plain = await http.post("/v1/chat/completions", json={"messages": [USER]})
    assert plain.status_code == 200
    assert backend.asked[1].prompt == asked.prompt
