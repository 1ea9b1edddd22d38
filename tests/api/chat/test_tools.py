"""Tests of tools in prompts and of calls in answers."""

import json
from copy import copy
from typing import Any, Final

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.served_model import ServedModel
from baton.api.text.chat_template import ChatTemplate
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.format_detection import model_formats
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, USER, chat, check
from tests.api.scripted import LENGTH, ScriptedBackend, saying

WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Final[dict[str, Any]] = {"type": "function", "function": {"name": "now"}}
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO: Final = f'Let me see.\n{CALL}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
ASKED: Final[list[dict[str, Any]]] = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            },
            {"id": "b", "type": "function", "function": {"name": "now", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "warm"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}]},
]


def prompt(backend: ScriptedBackend) -> str:
    return tiny.model().tokenizer.decode(backend.asked[-1].prompt, skip_special_tokens=False)


def functions(calls: Any) -> list[Any]:
    return list(calls or ())


@pytest.fixture(autouse=True)
def _room_for_tools(backend: ScriptedBackend) -> None:
    backend.known_limits = Limits(context_tokens=8192, prompt_tokens=8000, sequence_tokens=8192)


@pytest.fixture
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


async def test_a_template_that_knows_no_tools_has_them_told_in_the_system_message(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    system = {"role": "system", "content": "Be brief."}
    body = chat(messages=[system, USER], tools=[WEATHER, NOW], max_tokens=1)
    assert (await http.post(CHAT, json=body)).status_code == 200
    text = prompt(backend)
    assert text.startswith("<|start|>system\nBe brief.\n\n# Tools\n")
    told = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in told] == [WEATHER, NOW]
    assert (await http.post(CHAT, json=chat(tools=[NOW], max_tokens=1))).status_code == 200
    assert prompt(backend).startswith("<|start|>system\n# Tools\n")
    assert (await http.post(CHAT, json=chat(tools=[NOW], tool_choice="none"))).status_code == 200
    assert "now" not in prompt(backend)


async def test_calls_and_results_of_earlier_turns_are_told_in_words(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    assert (await http.post(CHAT, json=chat(messages=ASKED))).status_code == 200
    assert prompt(backend) == (
        "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
        f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call><|end|>\n<|start|>user\n'
        "<tool_response>\nwarm\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|end|>\n"
        "<|start|>assistant\n"
    )


async def test_calls_are_told_whole(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = lambda _: saying(TWO)
    asked: dict[str, Any] = {"model": tiny.MODEL, "messages": [USER], "tools": [WEATHER, NOW]}
    (choice,) = (await client.chat.completions.create(**asked)).choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    first, second = functions(choice.message.tool_calls)
    assert first.type == second.type == "function"
    assert (first.function.name, first.function.arguments) == ("weather", '{"city": "Paris"}')
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id
    (choice,) = (await client.chat.completions.create(**asked, parallel_tool_calls=False)).choices
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["weather"]
    backend.script = lambda _: saying(CALL)
    (choice,) = (await client.chat.completions.create(**asked)).choices
    assert choice.message.content is None


async def test_calls_are_streamed_in_pieces_that_join_to_what_is_told_whole(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying(TWO)
    asked: dict[str, Any] = {"model": tiny.MODEL, "messages": [USER], "tools": [WEATHER, NOW]}
    stream = await client.chat.completions.create(**asked, stream=True)
    deltas = [chunk.choices[0] async for chunk in stream]
    assert "".join(each.delta.content or "" for each in deltas) == "Let me see."
    assert [each.finish_reason for each in deltas if each.finish_reason] == ["tool_calls"]
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for each in deltas for call in each.delta.tool_calls or ()):
        assert call.function is not None
        if call.index not in calls:
            assert (call.type, call.function.arguments) == ("function", "")
            calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
        else:
            assert (call.id, call.type, call.function.name) == (None, None, None)
            calls[call.index]["arguments"] += call.function.arguments
    assert [(each["name"], json.loads(each["arguments"])) for each in calls.values()] == [
        ("weather", {"city": "Paris"}),
        ("now", {}),
    ]
    assert len({each["id"] for each in calls.values()}) == 2


async def test_the_clients_own_stream_helper_takes_them(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying(TWO)
    asked: dict[str, Any] = {"model": tiny.MODEL, "messages": [USER], "tools": [WEATHER, NOW]}
    async with client.chat.completions.stream(**asked) as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    assert [(each.name, each.arguments) for each in done] == [("weather", '{"city": "Paris"}'), ("now", "{}")]
    assert [call.function.name for call in final.choices[0].message.tool_calls or ()] == ["weather", "now"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_is_none_is_text_and_counted(
    http: httpx.AsyncClient, backend: ScriptedBackend, registry: CollectorRegistry, streamed: bool
) -> None:
    broken = CALL.replace("}}", "")
    backend.script = lambda _: saying(f"{broken} {CALL}")
    reply = await http.post(CHAT, json=chat(tools=[WEATHER], stream=streamed))
    assert reply.status_code == 200
    if streamed:
        chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        text = "".join(each["choices"][0]["delta"].get("content", "") for each in chunks)
    else:
        text = reply.json()["choices"][0]["message"]["content"]
    assert text == f"{broken} "
    assert registry.get_sample_value("baton_tool_calls_total", {"outcome": "read"}) == 1
    assert registry.get_sample_value("baton_tool_calls_total", {"outcome": "unread"}) == 1


@pytest.mark.parametrize(
    ("fields", "script", "content", "calls", "finish"),
    [
        ({}, saying(CALL), CALL, 0, "stop"),
        ({"tools": [WEATHER], "tool_choice": "none"}, saying(CALL), CALL, 0, "stop"),
        ({"tools": [WEATHER]}, saying(CALL, finish=LENGTH), None, 1, "length"),
        ({"tools": [WEATHER]}, saying(CALL[:30], finish=LENGTH), CALL[:30], 0, "length"),
        ({"tools": [WEATHER], "stop": ["</tool_call>"]}, saying(CALL), None, 1, "tool_calls"),
        ({"tools": [WEATHER], "stop": ["Paris"]}, saying(CALL), None, 1, "tool_calls"),
        ({"tools": [WEATHER]}, saying("No need. "), "No need. ", 0, "stop"),
    ],
)  # fmt: skip
async def test_calls_stop_strings_and_ends_go_together(
    http: httpx.AsyncClient,
    backend: ScriptedBackend,
    fields: dict[str, Any],
    script: Any,
    content: str | None,
    calls: int,
    finish: str,
) -> None:
    backend.script = lambda _: script
    (choice,) = (await http.post(CHAT, json=chat(**fields))).json()["choices"]
    message = choice["message"]
    assert (message["content"], len(message.get("tool_calls", ()))) == (content, calls)
    assert choice["finish_reason"] == finish


def tool(**said: Any) -> dict[str, Any]:
    return {"type": "function", "function": said}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def called(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}],
    }


TOOL_FAULTS: Final[list[tuple[dict[str, Any], str]]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": [NOW] * 1025}, "tools"),
    ({"tools": [WEATHER, NOW, NOW]}, "tools[2].function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [tool(name="a" * 129)]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [tool(name="a", parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(name="a", description="x" * 70_000)]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": allowed("auto", "then")}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": allowed("auto")}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": allowed("none", "now")}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[1].tool_call_id"),
    ({"messages": [*ASKED, {**ASKED[2], "tool_call_id": "c"}]}, "messages[4].tool_call_id"),
    ({"messages": [*ASKED, {"role": "tool", "tool_call_id": "a"}]}, "messages[4].content"),
    ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER, "tool_calls": ASKED[1]["tool_calls"]}]}, "messages[0].tool_calls"),
    *(
        ({"messages": [USER, called(each)]}, "messages[1].tool_calls[0].function.arguments")
        for each in ("{]", "[1]", "[", "nothing", 5, "{'a': 1}", '{"a": 1} and', '"a')
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"), TOOL_FAULTS, ids=lambda value: json.dumps(value)[:70].replace("/", " ")
)
async def test_what_is_wrong_with_tools_is_told_by_field(
    http: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    check(await http.post(CHAT, json=chat(**fields)), 400, param)
    assert backend.asked == []


QWEN: Final = (
    "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}"
)
"""A template that takes arguments as objects."""
DEEPSEEK: Final = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + c.function.arguments }}{% endfor %}"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
)
"""A template that takes arguments as text, and knows a call by the missing content."""


MISTRAL: Final = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}{{ c.function.arguments | tojson }}#{{ c.id }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ '#' + m.tool_call_id }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content or '' }}<|end|>\n{% endfor %}"
)
"""A template that takes only ids of nine characters."""


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (MISTRAL, '[TOOL_CALLS]weather{"city": "Paris"}#ca978112c'),
        (QWEN, '<tool_call>weather {"city": "Paris"}</tool_call>'),
        (DEEPSEEK, '<｜tool▁call▁begin｜>weather{"city": "Paris"}'),
    ],
    ids=["nine characters", "objects", "texts"],
)
def test_a_template_that_knows_calls_gets_them_as_it_takes_them(template: str, call: str) -> None:
    reference = copy(tiny.byte_level())
    reference.chat_template = template
    known = ChatTemplate(reference)
    assert known.knows_tools
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    calls = [{"id": "a", "type": "function", "function": function, "object": {"city": "Paris"}}]
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "warm", "tool_call_id": "a"},
    ]
    text = known.render(messages, add_generation_prompt=False, tools=[WEATHER])
    assert call in text
    assert "<|start|>tool\nwarm<|end|>" in text
    assert text.count("#ca978112c") in (0, 2)
    assert "None" not in text
    assert "# Tools" not in text


async def test_marks_that_are_special_tokens_are_heard_and_not_shown(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral's kind; `<|start|>` stands for its mark's neighbours, which say nothing."""
    reference = copy(tiny.byte_level())
    tokenizer = Tokenizer(reference)
    reference.chat_template = tiny.CHAT_TEMPLATE
    start = tokenizer.encode("<|start|>", add_special_tokens=False)[0]
    monkeypatch.setattr(Tokenizer, "special", {start: "[TOOL_CALLS]"})
    forms = model_formats(tokenizer, "", "mistral")
    served = ServedModel(tiny.MODEL, tokenizer, (tiny.END_ID,), len(reference), formats=forms)
    backend.script = lambda _: saying('Yes é.<|start|>weather[ARGS]{"city": "Paris"}')
    app = create_app(backend, served, CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        (choice,) = (await http.post(CHAT, json=chat(tools=[WEATHER]))).json()["choices"]
    assert choice["message"]["content"] == "Yes é."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert len(call["id"]) == 9


async def test_tools_that_may_not_be_told_are_refused(backend: ScriptedBackend) -> None:
    plain = tiny.model()
    forms = model_formats(plain.tokenizer, "", describes_tools=False)
    served = ServedModel(tiny.MODEL, plain.tokenizer, (tiny.END_ID,), plain.vocabulary, formats=forms)
    app = create_app(backend, served, CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        check(await http.post(CHAT, json=chat(tools=[NOW])), 400, "tools", "unsupported_value")
        assert (await http.post(CHAT, json=chat(tools=[]))).status_code == 200
