"""Tests that all APIs accept as history whatever one of them answered, whole or streamed, cut off or
complete."""

import itertools
import json
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic_core import from_json

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.requests.call_arguments import arguments_object, complete_part
from tests.api import tiny
from tests.api.chat.test_reasoning import served
from tests.api.scripted import LENGTH, STOP, ScriptedBackend, Step, saying

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS: Final = (CHAT, RESPONSES, MESSAGES)
TEMPLATE: Final = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SCHEMA: Final = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
CALL: Final = (
    '<tool_call>\n{"name": "write", "arguments": {"n": 12, "text": "This \\u00e9 is"}}\n</tool_call>'
)
REASONED: Final = "<think>\nHm.\n</think>\n\n"
ANSWERS: Final[dict[str, tuple[str, Any, bool]]] = {
    "a text": ("Hello world", STOP, False),
    "a text that was cut off": ("Hello wor", LENGTH, False),
    "nothing": ("", STOP, False),
    "reasoning and a text": (f"{REASONED}Hello", STOP, False),
    "reasoning alone": ("<think>\nHm, and", LENGTH, False),
    "a free call": (CALL, STOP, False),
    "a free call that was cut off": (CALL[:60], LENGTH, False),
    "reasoning, a text and calls": (f"{REASONED}I write.\n{CALL}\n{CALL}", STOP, False),
    "a forced call": (CALL, STOP, True),
    "reasoning and a forced call": (REASONED + CALL, STOP, True),
    **{
        f"a forced call that was cut off at {end}": (CALL[:end], LENGTH, True)
        for end in (30, 46, 50, 53, 60, 65, 68, 72, 76, 77, 79)
    },
}


class Served:
    """A model that gives one answer, behind all APIs."""

    def __init__(self, text: str = "ok", finish: Any = STOP) -> None:
        self.backend = ScriptedBackend(known_limits=Limits(8192, 8192, 8192))
        steps: list[Step] = saying(text, finish=finish) if text or finish is STOP else []
        self.backend.script = lambda _: steps
        self.app = create_app(self.backend, served(TEMPLATE), CollectorRegistry())

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            reply = await http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply

    async def prompt(self, path: str, turns: Sequence[Any]) -> str:
        """Return the prompt of a request with this conversation."""
        await self.post(path, _body(path, turns))
        text: str = tiny.model().tokenizer.decode(self.backend.asked[-1].prompt, skip_special_tokens=False)
        return text

    async def answer(self, path: str, *, forced: bool, stream: bool) -> tuple[str, list[Any]]:
        """Return why the answer ended, and the messages that a client adds to its history."""
        body = _body(path, [{"role": "user", "content": "hi"}], forced=forced) | {"stream": stream}
        reply = await self.post(path, body)
        if not stream:
            return _whole(path, reply.json())
        lines = (line.removeprefix("data: ") for line in reply.text.splitlines())
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return {CHAT: _chat, RESPONSES: _responses, MESSAGES: _messages}[path](events)


@cache
def taking() -> Served:
    return Served()


def _body(path: str, turns: Sequence[Any], *, forced: bool = False) -> dict[str, Any]:
    function = {"name": "write", "parameters": SCHEMA}
    if path == CHAT:
        tools = [{"type": "function", "function": function}]
        return {"messages": turns, "tools": tools, "tool_choice": "required" if forced else "auto"}
    if path == RESPONSES:
        choice = "required" if forced else "auto"
        return {"input": turns, "tools": [{"type": "function", **function}], "tool_choice": choice}
    tools = [{"name": "write", "input_schema": SCHEMA}]
    more = {"tools": tools, "tool_choice": {"type": "any" if forced else "auto"}}
    return {
        "model": tiny.MODEL,
        "messages": turns,
        "max_tokens": 500,
        "thinking": {"type": "adaptive"},
        **more,
    }


def _whole(path: str, body: Any) -> tuple[str, list[Any]]:
    if path == CHAT:
        (choice,) = body["choices"]
        return choice["finish_reason"], [choice["message"]]
    if path == RESPONSES:
        return body["status"], body["output"]
    return body["stop_reason"], [body]


def _chat(events: list[Any]) -> tuple[str, list[Any]]:
    """Return a message whose deltas are joined as client libraries do."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    for event in events:
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append(piece)
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return events[-1]["choices"][0]["finish_reason"], [message]


def _responses(events: list[Any]) -> tuple[str, list[Any]]:
    return events[-1]["response"]["status"], events[-1]["response"]["output"]


def _messages(events: list[Any]) -> tuple[str, list[Any]]:
    blocks: list[dict[str, Any]] = []
    written: dict[int, str] = {}
    reason = ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    written[event["index"]] = written.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    blocks[-1][name] = blocks[-1].get(name, "") + delta[name]
            case "message_delta":
                reason = event["delta"]["stop_reason"]
    for place, text in written.items():
        blocks[place]["input"] = from_json(text or "{}", allow_partial=True)
    return reason, [{"role": "assistant", "content": blocks}]


def _said(answer: Sequence[Any]) -> list[Any]:
    """Return an answer without the parts that differ from one request to the next."""
    told: list[Any] = json.loads(json.dumps([*answer]))
    for part in told:
        blocks = part.get("content") if isinstance(part.get("content"), list) else []
        for each in (part, *part.get("tool_calls", ()), *blocks):
            for name in ("id", "call_id", "index", "model", "type", "usage", "refusal", "encrypted_content"):
                each.pop(name, None)
            for name in ("reasoning", "reasoning_content", "stop_reason", "stop_sequence"):
                if each.get(name) is None or name.startswith("stop"):
                    each.pop(name, None)
            if each.get("content") is None:
                each["content"] = ""
    return told


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_the_same_whole_and_streamed_and_is_taken_back_by_every_api(name: str) -> None:
    text, finish, forced = ANSWERS[name]
    model, taker = Served(text, finish), taking()
    prompts: dict[str, set[str]] = {path: set() for path in APIS}
    for source in APIS:
        whole = await model.answer(source, forced=forced, stream=False)
        streamed = await model.answer(source, forced=forced, stream=True)
        assert whole[0] == streamed[0]
        assert _said(whole[1]) == _said(streamed[1])
        for target, (_, answer) in itertools.product(APIS, (whole, streamed)):
            turns = [{"role": "user", "content": "hi"}, *answer, {"role": "user", "content": "so?"}]
            prompt = await taker.prompt(target, turns)
            if not (source == MESSAGES and finish is LENGTH):  # its object has no text that was cut off
                prompts[target].add(prompt)
    assert [len(each) for each in prompts.values()] == [1, 1, 1]
    ((prompt,),) = {tuple(each) for each in prompts.values()}
    for part in ("Hello", "Hm.", "I write.", '"n": 12'):
        assert (part in prompt) == (part in text), prompt


BEFORE: Final = {"role": "user", "content": "hi"}
BEHIND: Final = {"role": "user", "content": "so?"}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("end", range(1, len('{"text": "This \\ud83d\\ude00 is", "n": -1.5e3, "b": [true]}')))
async def test_every_beginning_of_arguments_is_taken_back(path: str, end: int) -> None:
    arguments = '{"text": "This \\ud83d\\ude00 is", "n": -1.5e3, "b": [true]}'[:end]
    call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "cut off"}
    turns = [BEFORE, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    prompt = await taking().prompt(path, turns)
    assert ("This" in prompt) == ("This" in arguments)
    assert "cut off" in prompt


NATIVE: Final[dict[str, list[Any]]] = {
    CHAT: [
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "write", "arguments": '{"text": "This is'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "cut off"},
    ],
    RESPONSES: [
        {"type": "function_call", "call_id": "c", "name": "write", "arguments": '{"text": "This is'},
        {"type": "function_call_output", "call_id": "c", "output": "cut off"},
    ],
    MESSAGES: [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "write", "input": '{"text": "This is'}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "cut off"}]},
    ],
}


@pytest.mark.parametrize("path", APIS)
async def test_a_cut_call_in_an_apis_own_shape_and_its_result_are_taken(path: str) -> None:
    prompt = await taking().prompt(path, [BEFORE, *NATIVE[path], BEHIND])
    assert '{"text": "This is"}' in prompt
    assert "cut off" in prompt


THINKING: Final = {"type": "thinking", "thinking": "abc"}
ASSISTANTS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "null": ({"content": None}, ""),
    "nothing at all": ({}, ""),
    "an empty list of calls": ({"content": None, "tool_calls": []}, ""),
    "output_text": ({"content": [{"type": "output_text", "text": "abc", "annotations": []}]}, "abc"),
    "input_text": ({"content": [{"type": "input_text", "text": "abc"}]}, "abc"),
    "text": ({"content": [{"type": "text", "text": "abc", "citations": None}]}, "abc"),
    "a refusal part": ({"content": [{"type": "refusal", "refusal": "abc"}]}, "abc"),
    "a refusal": ({"content": None, "refusal": "abc"}, "abc"),
    "a thinking block": (
        {
            "content": [
                {"type": "thinking", "thinking": "abc", "signature": "x"},
                {"type": "text", "text": "d"},
            ]
        },
        "abc",
    ),
    "hidden reasoning": ({"content": [{"type": "redacted_thinking", "data": "x"}]}, ""),
    "reasoning_details": (
        {"content": "d", "reasoning_details": [{"type": "reasoning.text", "text": "abc"}]},
        "abc",
    ),
    "thinking_blocks": (
        {"content": "d", "thinking_blocks": [THINKING]},
        "abc",
    ),
    "thinking": ({"content": "d", "thinking": "abc"}, "abc"),
    "reasoning twice": ({"content": "d", "reasoning": "abc", "reasoning_content": "abc"}, "abc"),
    "what OpenAI's says of nothing": (
        {"content": "abc", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        "abc",
    ),
    "sources": ({"content": "abc", "annotations": [{"type": "url_citation"}], "citations": ["x"]}, "abc"),
    "what LiteLLM adds": (
        {"content": "abc", "provider_specific_fields": {"x": 1}, "images": [], "thinking_blocks": None},
        "abc",
    ),
    "what LangChain adds": (
        {"content": "abc", "additional_kwargs": {}, "response_metadata": {"x": 1}},
        "abc",
    ),
    "an envelope": (
        {
            "content": "abc",
            "id": "x",
            "type": "message",
            "status": "completed",
            "model": "m",
            "usage": {"a": 1},
        },
        "abc",
    ),
    "an empty field that nobody knows": ({"content": "abc", "colour": "", "shape": {}}, "abc"),
    "what Gemini adds to a call": (
        {
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "index": 0,
                    "function": {"name": "write", "arguments": '{"text": "abc"}'},
                    "extra_content": {"google": {"thought_signature": "x"}},
                }
            ],
        },
        "abc",
    ),
}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("name", ASSISTANTS)
async def test_an_assistants_message_of_any_server_is_taken(path: str, name: str) -> None:
    message, text = ASSISTANTS[name]
    prompt = await taking().prompt(path, [BEFORE, {"role": "assistant", **message}, BEHIND])
    assert text in prompt
    assert "None" not in prompt
    assert "<|start|>assistant" in prompt


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "abc", "colour": "red"}, "colour"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content"),
        (
            {"content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{]"}}]},
            "arguments",
        ),
        ({"content": None, "tool_calls": "none"}, "tool_calls"),
        ({"content": None, "reasoning_content": 5}, "reasoning_content"),
        ({"content": [{"type": "tool_use", "id": "c", "name": "f", "input": 5}]}, ""),
        ({"content": [{"type": 5}]}, "content"),
        ({"content": [{"type": ["x"]}]}, "content"),
        ({"content": [{"type": {}}]}, "content"),
        ({"content": [5]}, "content"),
        ({"content": {"a": 1}}, "content"),
        ({"content": "abc", "refusal": 5}, "refusal"),
        ({"tool_calls": [5]}, "tool_calls"),
        ({"tool_calls": [{"id": "c"}]}, "function"),
        ({"thinking": 5}, ""),
        ({"content": 5}, "content"),
    ],
)
async def test_what_carries_something_else_is_refused(path: str, message: dict[str, Any], param: str) -> None:
    model = taking()
    asked = len(model.backend.asked)
    transport = httpx.ASGITransport(model.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = await http.post(path, json=_body(path, [BEFORE, {"role": "assistant", **message}, BEHIND]))
    assert reply.status_code == 400, reply.text
    assert param in reply.json()["error"]["message"]
    assert len(model.backend.asked) == asked


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    "element",
    [
        {"type": ["x"]},
        {"type": ["x"], "role": ["x"], "content": "abc"},
        {"type": "function_call"},
        {"type": "function_call", "call_id": "c", "name": ["x"], "namespace": {}},
        {"type": "function_call_output", "call_id": "d", "output": "abc"},
        {"role": "tool", "content": "abc"},
        {"role": "tool", "content": None, "tool_call_id": "d"},
        {"role": ["x"], "content": "abc"},
        5,
        None,
    ],
)
async def test_what_is_no_element_of_a_conversation_is_refused(path: str, element: Any) -> None:
    model = taking()
    transport = httpx.ASGITransport(model.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = await http.post(path, json=_body(path, [BEFORE, element, BEHIND]))
    assert reply.status_code == 400, reply.text


VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.data())
def test_every_beginning_of_an_object_is_an_object(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    assert arguments_object(text) == complete_part(text) == value
    begun = text[: data.draw(st.integers(1, len(text)))]
    assert set(complete_part(begun)) <= set(arguments_object(begun)) <= set(value)


@pytest.mark.parametrize("text", ["[", "x", '"a', "1", '{"a": 1}}', '{"a": 1} b', "{]", "{a", "null"])
def test_what_begins_no_object_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        arguments_object(text)


def test_half_a_surrogate_pair_in_arguments_is_a_replacement_character() -> None:
    assert arguments_object('{"a": "x\\ud83d", "b": "\\ude00\\ud83d\\ude00", "c": "\\\\ud83d"}') == {
        "a": "x\ufffd",
        "b": "\ufffd\U0001f600",
        "c": "\\ud83d",
    }
