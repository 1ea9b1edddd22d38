"""Tests that an Anthropic request means the equivalent chat request, and that errors are in Anthropic's
terms."""

import json
from typing import Any, Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.errors import ApiError
from baton.api.http.request_bodies import parse
from baton.api.messages.message_request import ELSEWHERE, MESSAGES_UNSUPPORTED, CountRequest, MessagesRequest
from baton.api.messages.message_translation import translated
from baton.api.requests.schema_fields import fields_of
from baton.api.settings import ApiSettings
from tests.api import tiny
from tests.api.scripted import ScriptedBackend, batch, saying

ROUTE: Final = "/v1/messages"
ROOMY: Final = Limits(context_tokens=8192, prompt_tokens=8192, sequence_tokens=8192)
USER: Final[dict[str, Any]] = {"role": "user", "content": "hi"}
TOOL: Final[dict[str, Any]] = {"name": "now", "input_schema": {"type": "object"}}
USE: Final[dict[str, Any]] = {"type": "tool_use", "id": "t", "name": "now", "input": {"at": "é"}}
RESULT: Final[dict[str, Any]] = {"type": "tool_result", "tool_use_id": "t", "content": "noon"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": tiny.MODEL, "max_tokens": 8, "messages": [USER], **fields}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def chat_of(**fields: Any) -> dict[str, Any]:
    """Return the messages of the equivalent chat request."""
    chat, _ = translated(parse(json.dumps(body(**fields)).encode(), MessagesRequest))
    return chat.model_dump(exclude_defaults=True)


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


CALL: Final = {"id": "t", "function": {"name": "now", "arguments": '{"at": "é"}'}}


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"system": "S"}, [{"role": "system", "content": "S"}, USER]),
        ({"system": [text("S"), text("T")]}, [{"role": "system", "content": ["S", "T"]}, USER]),
        (
            {"system": [text("x-anthropic-billing-header: cch=1"), text("S")]},
            [{"role": "system", "content": "S"}, USER],
        ),
        ({"system": [text("x-anthropic-billing-header: cch=1")]}, [USER]),
        (
            {"messages": [{"role": "system", "content": "S"}, USER]},
            [{"role": "system", "content": "S"}, USER],
        ),
        (
            {"messages": [USER, {"role": "system", "content": "S"}]},
            [{"role": "user", "content": ["hi", "\n\nS"]}],
        ),
        (
            {"messages": [USER, user(text("a"), text("b"))]},
            [{"role": "user", "content": ["hi", "\n\na", "b"]}],
        ),
        (
            {"messages": [USER, assistant(text("a"), USE), user(text("and"), RESULT)]},
            [
                USER,
                {"role": "assistant", "content": "a", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "t", "content": "noon"},
                {"role": "user", "content": "and"},
            ],
        ),
        (
            {"messages": [USER, assistant(USE), user(RESULT), {"role": "system", "content": "S"}]},
            [
                USER,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "t", "content": ["noon", "\n\nS"]},
            ],
        ),
        (
            {
                "messages": [
                    USER,
                    assistant({"type": "thinking", "thinking": "Hm.", "signature": "s"}, USE),
                    assistant({"type": "redacted_thinking", "data": "x"}),
                    user({**RESULT, "content": [text("a"), text("b")], "is_error": True}),
                ]
            },
            [
                USER,
                {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "t", "content": ["Error: a", "b"]},
            ],
        ),
    ],
)
def test_messages_are_turns(fields: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert chat_of(**fields)["messages"] == messages


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"stop_sequences": ["a"], "top_k": 3}, {"stop": ["a"], "top_k": 3}),
        ({"temperature": 0.5, "top_p": 0.5}, {"temperature": 0.5, "top_p": 0.5}),
        (
            {"seed": 3, "bad_words": ["a"], "guided_regex": "a+"},
            {"seed": 3, "bad_words": ["a"], "guided_regex": "a+"},
        ),
        ({"messages": [USER, assistant(text("I "))]}, {"continue_final_message": True}),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "now"}}, {"tool_choice": {"name": "now"}}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"parallel_tool_calls": False},
        ),
        (
            {"chat_template_kwargs": {"thinking": True, "x": 1}},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": True, "x": 1}},
        ),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
    ],
)
def test_fields_are_those_of_a_chat(fields: dict[str, Any], asked: dict[str, Any]) -> None:
    assert asked.items() <= chat_of(**fields).items()


async def test_what_agents_send_besides_is_taken(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    """Fields that Claude Code and the client library send beside the documented ones are accepted."""
    backend.known_limits = ROOMY
    ephemeral = {"type": "ephemeral", "ttl": "1h"}
    said = {**text("hi"), "cache_control": ephemeral, "citations": None}
    told = {
        **TOOL,
        "type": "custom",
        "description": "Now.",
        "cache_control": ephemeral,
        "eager_input_streaming": True,
    }
    more = {
        "betas": ["a"],
        "cache_control": ephemeral,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "max_tokens": 32000,
        "mcp_servers": [],
        "messages": [
            user(said),
            assistant({**USE, "caller": {"type": "direct"}}),
            user({**RESULT, "cache_control": ephemeral}),
        ],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "high"},
        "service_tier": "auto",
        "speed": "standard",
        "stop_sequences": None,
        "system": [{**text("Be brief."), "cache_control": {**ephemeral, "scope": "global"}}],
        "temperature": 1,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "tools": [told],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "none"}
    reply = await http.post(f"{ROUTE}?beta=true", json=body(**more), headers=headers)
    assert reply.status_code == 200, reply.text
    (asked,) = backend.asked
    assert asked.max_tokens == 8192 - len(asked.prompt)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "Missing required parameter: 'max_tokens'."),
        ({"max_tokens": 0}, "Invalid value for 'max_tokens': it has to be at least 1."),
        ({"stop": ["a"], "stop_sequences": ["a"]}, "Give 'stop_sequences' or 'stop', not both."),
        ({"max_completion_tokens": 3}, "'max_completion_tokens' is not supported; use 'max_tokens'."),
        ({"stop_sequences": ["a", ""]}, "Invalid value for 'stop_sequences[1]': it is empty."),
        ({"sytem": "S"}, "Unrecognized request argument supplied: sytem; did you mean 'system'?"),
        ({"mcp_servers": [{}]}, "'mcp_servers' is not supported, except as []."),
        (
            {"messages": [{"role": "wizard", "content": "a"}]},
            "Invalid value for 'messages[0].role': it has to be",
        ),
        (
            {"messages": [user({"type": "image", "source": {}})]},
            "'messages[0].content[0]': blocks of type 'image' are",
        ),
        (
            {"messages": [user({"type": "poem"})]},
            "'messages[0].content[0]': the type of a block has to be one of",
        ),
        (
            {"messages": [user({"type": "text", "txt": "a"})]},
            "Missing required parameter: 'messages[0].content[0].text'",
        ),
        (
            {"messages": [user({**text("a"), "txt": 1})]},
            "supplied: messages[0].content[0].txt; did you mean 'text'?",
        ),
        ({"messages": [user("a")]}, "Invalid type for 'messages[0].content[0]': it has to be a block"),  # type: ignore[arg-type]
        (
            {"messages": [{"role": "user", "content": 1}]},
            "Invalid type for 'messages[0].content': it has to be",
        ),
        ({"messages": [user(USE)]}, "'messages[0].content[0]': a tool_use belongs to an assistant's"),
        (
            {"messages": [USER, assistant(RESULT)]},
            "'messages[1].content[0]': a tool_result belongs to a user's",
        ),
        (
            {"messages": [user(text("a"), RESULT)]},
            "'messages[0].content[1].tool_use_id': no message before it",
        ),
        ({"messages": [USER, assistant(USE)]}, "'messages[1]': behind a tool_use comes its tool_result"),
        (
            {"messages": [user({**RESULT, "content": [{"type": "document"}]})]},
            "'messages[0].content[0].content[0]': blocks of",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "'tools[0]': 'web_search_20250305' is not supported; a tool has to be of type 'custom'",
        ),
        ({"tools": [{"name": "now"}]}, "Missing required parameter: 'tools[0].input_schema'."),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "stop"}, "stop_sequences": ["a"]},
            "'tool_choice.name': 'tools' has none named \"stop\".",
        ),
        ({"tools": [TOOL, TOOL]}, "'tools[1].name': there is another tool named \"now\"."),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "'tools[0].defer_loading' is not supported."),
        ({"tools": [{**TOOL, "parameters": {}}]}, "'tools[0].parameters' is not supported."),
        ({"tool_choice": {"type": "any"}}, "'tool_choice' is required, and there are no 'tools'."),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool"}},
            "Missing required parameter: 'tool_choice.name'.",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            "'tool_choice.name': 'tools' has none named \"x\".",
        ),
        (
            {"tools": [{"name": "now", "strict": True, "input_schema": {"uniqueItems": 1, "type": "array"}}]},
            "'tools[0].input_schema': no answer can be held to it",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5}},
            "'thinking.budget_tokens': it has to be at least 1024.",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"uniqueItems": 1}}}},
            "'output_config.format.schema': no answer can be held to it",
        ),
        (
            {"system": "a" * 5000},
            "prompt is too long: This model's maximum context length is 512 tokens. However, 'messages'",
        ),
        ({"messages": [{"role": "user", "content": "REFUSE"}]}, "no such thing."),
    ],
)
async def test_what_is_wrong_is_said_by_the_bodys_own_paths(
    http: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], says: str
) -> None:
    reply = await http.post(ROUTE, json=body(**fields))
    told = reply.json()
    assert reply.status_code == 400
    assert told == {"type": "error", "error": told["error"], "request_id": reply.headers["request-id"]}
    assert told["error"].keys() == {"type", "message", "details"}
    assert told["error"]["type"] == "invalid_request_error"
    assert says in told["error"]["message"]
    assert backend.asked == []


@pytest.mark.parametrize("kind", sorted(ELSEWHERE))
def test_blocks_that_are_not_served_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ApiError, match=f"'{kind}' are not supported"):
        parse(json.dumps(body(messages=[user({"type": kind})])).encode(), MessagesRequest)


def test_what_is_refused_by_name_or_taken_without_effect_is_no_field() -> None:
    fields = fields_of(MessagesRequest)
    assert "cache_control" in fields["messages.[].content.[]"]
    for shape, names in MESSAGES_UNSUPPORTED.known.items():
        assert names.isdisjoint(fields[shape])
    assert {*MESSAGES_UNSUPPORTED.ignored, *MESSAGES_UNSUPPORTED.harmless}.isdisjoint(fields[""])
    assert MESSAGES_UNSUPPORTED.instead.keys() <= MESSAGES_UNSUPPORTED.known[""]
    assert set(fields_of(CountRequest)[""]) < set(fields[""])


def test_each_path_of_the_chat_is_one_of_the_body() -> None:
    said = [USER, assistant(USE), user(RESULT, text("b"), text("c"))]
    _, terms = translated(parse(json.dumps(body(system="S", messages=said)).encode(), MessagesRequest))
    paths = {
        "messages[0].content": "system",
        "messages[1].content": "messages[0].content",
        "messages[2].tool_calls[0].function.arguments": "messages[1].content[0].input",
        "messages[2].tool_calls[0].function.name": "messages[1].content[0].name",
        "messages[3].content": "messages[2].content[0].content",
        "messages[3].tool_call_id": "messages[2].content[0].tool_use_id",
        "messages[4].content": "messages[2].content",
        "messages[4].content[1].text": "messages[2].content[2].text",
    }
    assert {path: terms.own(path) for path in paths} == paths
    said = [USER, assistant(USE), {"role": "system", "content": "S"}, user(RESULT)]
    _, terms = translated(parse(json.dumps(body(messages=said)).encode(), MessagesRequest))
    assert terms.own("messages[2].content[0].text") == "messages[3].content[0].content"
    assert terms.own("messages[2].content[1].text") == "messages[2].content"


async def test_events_have_names_and_blocks_follow_each_other(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.known_limits = ROOMY
    backend.script = lambda _: saying('Hm.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    reply = await http.post(ROUTE, json=body(stream=True, tools=[TOOL], max_tokens=64))
    events = [event.split("\n") for event in reply.text.rstrip("\n").split("\n\n")]
    told = [json.loads(data.removeprefix("data: ")) for _, _, data in events]
    assert [name for _, name, _ in events] == [f"event: {each['type']}" for each in told]
    shown = [
        (each["type"], each.get("index"), each.get("delta", each.get("content_block", {})).get("type"))
        for each in told
        if each["type"].startswith("content") and each.get("delta", {}).get("type") != "text_delta"
    ]
    assert shown == [
        ("content_block_start", 0, "text"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "tool_use"),
        ("content_block_delta", 1, "input_json_delta"),
        ("content_block_stop", 1, None),
    ]
    start, end = told[0]["message"], told[-2]
    assert start["usage"]["input_tokens"] == len(backend.asked[0].prompt)
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["cache_read_input_tokens"] == 3


async def test_an_answer_without_a_word_is_a_message_without_blocks(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying("")
    assert (await http.post(ROUTE, json=body())).json()["content"] == []
    streamed = (await http.post(ROUTE, json=body(stream=True))).text
    assert "content_block" not in streamed
    assert streamed.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_text_after_a_call_is_in_a_block_of_its_own_however_it_is_cut(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    """One batch of tokens may end a tool call and open the next text block. The event template of one text
    block is not used for the next."""
    backend.known_limits = ROOMY
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    one = "The quick brown fox"
    backend.script = lambda _: [
        *(batch([id_]) for id_ in tiny.ids(one)),
        batch(tiny.ids(f"{call}b")),
        *saying(f"{one}{call}d"),
    ]
    reply = await http.post(ROUTE, json=body(stream=True, tools=[TOOL], max_tokens=99))
    texts: dict[int, str] = {}
    for line in reply.text.splitlines():
        if '"text_delta"' in line:
            event = json.loads(line.removeprefix("data: "))
            texts[event["index"]] = texts.get(event["index"], "") + event["delta"]["text"]
    assert texts == {0: one, 2: f"b{one}", 4: "d"}


async def test_before_any_route_errors_have_the_manners_of_the_api_that_is_asked() -> None:
    app = create_app(ScriptedBackend(), tiny.model(), CollectorRegistry(), ApiSettings(body_bytes_max=100))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        replies = {
            "not_found_error": await http.post(f"{ROUTE}/batches", json={}),
            "request_too_large": await http.post(ROUTE, json=body(system="a" * 200)),
            "invalid_request_error": await http.get(ROUTE),
        }
        for kind, reply in replies.items():
            assert reply.json()["error"]["type"] == kind
            assert reply.headers["request-id"] == reply.headers["x-request-id"] == reply.json()["request_id"]
        assert replies["invalid_request_error"].status_code == 405
        refused = await http.post(ROUTE, json=body(), headers={"X-Request-Id": " "})
        assert refused.json()["type"] == "error"
        openai = await http.post("/v1/messagesque", json={})
        assert openai.json()["error"]["code"] == "not_found"
        assert "request-id" not in openai.headers
        asked_by_anthropics = await http.get("/v1/models/x", headers={"anthropic-version": "2023-06-01"})
        assert asked_by_anthropics.json()["error"]["type"] == "not_found_error"
