"""Constrained calls are streamed as they grow, and join to the calls of the whole answer."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.tools.constraints.tool_call_grammar import call_layout
from baton.api.tools.formats.call_layouts import ARGUMENTS, NAME, JsonCallLayout
from baton.api.tools.formats.output_formats import TOOL_CALL_FORMATS, find_format
from baton.api.tools.parsing.output_parser import OutputParser
from baton.api.tools.parsing.output_parts import (
    CompleteToolCall,
    ContentDelta,
    OutputPart,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
    merge_parts,
)
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, chat
from tests.api.tools.test_output_parser import SCHEMAS, markup
from tests.api.tools.test_tool_call_grammar import MARKS, RandomModel, served, tool

NAMES: Final = sorted(SCHEMAS)
LAYOUTS: Final = {
    each.names[0]: each.layouts.parts
    for each in TOOL_CALL_FORMATS
    if isinstance(each.layouts, JsonCallLayout)
}
"""Parts of a call by format."""
FORMATS: Final = sorted(LAYOUTS)
SPIKY: Final = [
    "</tool_call>",
    "[TOOL_CALLS]",
    "<think>",
    '"',
    "\\",
    "}",
    "{",
    "é",
    "\n",
    "<｜tool▁call▁end｜>",
]
TEXTS: Final = st.lists(st.sampled_from(SPIKY) | st.text(max_size=3), max_size=3).map("".join)
VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
CALLS: Final = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(TEXTS, VALUES, max_size=3)), min_size=1, max_size=3
)


def written(name: str, calls: Sequence[tuple[str, dict[str, Any]]], *, ascii_: bool = False) -> str:
    """Return the calls as a grammar writes them."""
    parts = []
    for tool_name, arguments in calls:
        own = {NAME: tool_name, ARGUMENTS: json.dumps(arguments, ensure_ascii=ascii_)}
        parts.append("".join(own.get(each, each) for each in LAYOUTS[name]))
    return "\n".join(parts)


def parsed(name: str, pieces: Sequence[str], *, streams: bool, end: bool = True) -> list[OutputPart]:
    calls = find_format(name, TOOL_CALL_FORMATS)
    assert calls is not None
    both = calls.markup | markup(None, "think")
    parser = OutputParser(both, SCHEMAS, layout=call_layout(calls), streams_calls=streams)
    parts: list[OutputPart] = []
    for piece in pieces:
        parts += parser.push(piece)
    assert parser.malformed_calls == 0
    return merge_parts(parts + (parser.flush() if end else []))


def folded(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """Return the parts with each streamed call as a complete one."""
    whole: list[OutputPart] = []
    for part in parts:
        match part, whole[-1] if whole else None:
            case ToolCallStart(name), _:
                whole.append(CompleteToolCall(name, ""))
            case ToolCallDelta(more), CompleteToolCall(name, arguments):
                whole[-1] = CompleteToolCall(name, arguments + more)
            case _:
                whole.append(part)
    return whole


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(FORMATS),
    calls=CALLS,
    reasoning=st.sampled_from(["", "<think>Hm. {</think>\n"]),
    ascii_=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_streamed_calls_join_to_complete_ones_however_the_text_is_cut(
    name: str, calls: list[tuple[str, dict[str, Any]]], reasoning: str, ascii_: bool, cuts: list[int]
) -> None:
    text = reasoning + written(name, calls, ascii_=ascii_)
    complete = [CompleteToolCall(name, json.dumps(given, ensure_ascii=ascii_)) for name, given in calls]
    expected: list[OutputPart] = [ReasoningDelta("Hm. {"), *complete] if reasoning else [*complete]
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    cut = [text[start:stop] for start, stop in pairwise(bounds)]
    assert parsed(name, cut, streams=False) == expected
    grown = parsed(name, cut, streams=True)
    assert grown == parsed(name, list(text), streams=True)
    assert folded(grown) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_each_character_of_an_argument_is_streamed_at_once(name: str) -> None:
    given = {"city": 'Paris "}</tool_call>', "more": [{}]}
    text, arguments = written(name, [("weather", given), ("now", {})]), json.dumps(given)
    begins = text.index(arguments)
    for end in range(len(text)):
        parts = parsed(name, list(text[:end]), streams=True)
        first = parts[:2]
        if end <= begins:
            assert not any(isinstance(part, ToolCallStart | ToolCallDelta) for part in parts)
        else:
            assert first == [ToolCallStart("weather"), ToolCallDelta(arguments[: end - begins])], text[:end]
        assert not [
            part
            for part in parsed(name, list(text[:end]), streams=True, end=False)
            if isinstance(part, ContentDelta)
        ]


@pytest.mark.parametrize("name", FORMATS)
def test_whole_answers_have_no_part_of_a_call_that_was_cut_off(name: str) -> None:
    text = written(name, [("weather", {"city": "Paris"}), ("now", {})])
    for end in range(len(text)):
        parts = parsed_whole(name, text[:end])
        calls = [part for part in parts if isinstance(part, CompleteToolCall)]
        assert (
            calls
            == [CompleteToolCall("weather", '{"city": "Paris"}'), CompleteToolCall("now", "{}")][: len(calls)]
        )


def parsed_whole(name: str, text: str) -> list[OutputPart]:
    calls = find_format(name, TOOL_CALL_FORMATS)
    assert calls is not None
    parser = OutputParser(calls.markup, SCHEMAS, layout=call_layout(calls))
    return merge_parts(parser.push(text) + parser.flush())


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "now"}</tool_call>', '<tool_call>\n{"name": "x', "<tool_call>"]
)
def test_what_is_not_as_the_grammar_has_it_is_read_as_any_text(text: str) -> None:
    calls = find_format("hermes", TOOL_CALL_FORMATS)
    assert calls is not None
    free, constrained = (
        OutputParser(calls.markup, SCHEMAS, layout=layout, streams_calls=True)
        for layout in (None, call_layout(calls))
    )
    assert constrained.push(text) + constrained.flush() == free.push(text) + free.flush()
    assert constrained.malformed_calls == free.malformed_calls


ASKED: Final[dict[str, Any]] = {"tools": [tool(), tool("later")], "tool_choice": "required"}


@pytest.mark.parametrize("added", [(), MARKS], ids=["marks in letters", "marks as tokens"])
@pytest.mark.parametrize("name", FORMATS)
async def test_a_forced_call_comes_letter_by_letter_and_joins_to_the_whole_one(
    name: str, added: Sequence[str]
) -> None:
    model = served(tiny.CHAT_TEMPLATE, name, added)
    whole = await RandomModel(model, "No.").ask(**ASKED)
    chunks = await RandomModel(model, "No.").events(CHAT, chat(**ASKED))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls: list[dict[str, Any]] = []
    pieces = 0
    for delta in deltas:
        assert not delta.get("content")
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls)
                calls.append({"type": piece["type"], "function": dict(piece["function"])})
            else:
                pieces += 1
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    complete = [
        {name: call[name] for name in ("type", "function")} for call in whole["message"]["tool_calls"]
    ]
    assert calls == complete
    assert pieces > 3 * len(calls)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"


async def test_a_call_that_is_cut_off_is_the_same_in_a_stream_and_in_a_whole_answer() -> None:
    model = served(tiny.CHAT_TEMPLATE)
    wanted = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
    most = len(model.tokenizer.encode(wanted.partition("Rom")[0], add_special_tokens=False))
    whole = await RandomModel(model, wanted).ask(**ASKED, max_tokens=most)
    (call,) = whole["message"]["tool_calls"]
    assert (whole["finish_reason"], call["function"]["name"]) == ("length", "weather")
    chunks = await RandomModel(model, wanted).events(CHAT, chat(**ASKED, max_tokens=most))
    pieces = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0]["function"]["name"] == "weather"
    assert call["function"]["arguments"].startswith('{"city": "')
    assert "".join(each["function"]["arguments"] for each in pieces) == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("more", [{"stop_token_ids": [5]}])
async def test_a_call_that_a_stop_may_break_is_returned_complete(more: dict[str, Any]) -> None:
    model = served(tiny.CHAT_TEMPLATE)
    wanted = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>'
    chunks = await RandomModel(model, wanted).events(CHAT, chat(**ASKED, parallel_tool_calls=False, **more))
    pieces = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [each["function"]["arguments"] for each in pieces] == ["", '{"city": "Bern", "days": 3}']


async def test_only_the_first_call_is_streamed_without_parallel_calls() -> None:
    """The grammar allows one call. A call without a grammar is returned when it is complete."""
    model = served(tiny.CHAT_TEMPLATE)
    chunks = await RandomModel(model, "No.").events(CHAT, chat(**ASKED, parallel_tool_calls=False))
    pieces = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert {each["index"] for each in pieces} == {0}
    json.loads("".join(each["function"]["arguments"] for each in pieces))


async def test_other_apis_have_a_call_as_it_grows() -> None:
    model = served(tiny.CHAT_TEMPLATE)
    user = {"role": "user", "content": "hi"}
    function = tool()["function"]
    events = await RandomModel(model, "No.").events(
        "/v1/messages",
        {
            "model": tiny.MODEL,
            "max_tokens": 300,
            "messages": [user],
            "tools": [{"name": "weather", "input_schema": function["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    )
    pieces = [each["delta"]["partial_json"] for each in events if "partial_json" in each.get("delta", ())]
    begun = [each for each in events if each.get("content_block", {}).get("type") == "tool_use"]
    opened = [each["index"] for each in events if each["type"] == "content_block_start"]
    closed = [each["index"] for each in events if each["type"] == "content_block_stop"]
    assert opened == closed == list(range(len(begun)))
    assert len(pieces) > 3 * len(begun)
    events = await RandomModel(model, "No.").events(
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", **function}], "tool_choice": "required"},
    )
    items = events[-1]["response"]["output"]
    for place, item in enumerate(items):
        own = [each for each in events if each.get("output_index") == place]
        deltas = [each["delta"] for each in own if each["type"].endswith("arguments.delta")]
        assert len(deltas) > 3
        assert "".join(deltas) == item["arguments"]
        json.loads(item["arguments"])
