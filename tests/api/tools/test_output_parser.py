"""Tests that the batches in which a model's text arrives change none of its parsed parts, and that no part is
lost."""

import json
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.tools.formats.output_formats import REASONING_FORMATS, TOOL_CALL_FORMATS, find_format
from baton.api.tools.parsing.output_markup import OutputMarkup
from baton.api.tools.parsing.output_parser import OutputParser
from baton.api.tools.parsing.output_parts import (
    CompleteToolCall,
    ContentDelta,
    OutputPart,
    ReasoningDelta,
    merge_parts,
)

SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "more": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "where": {"type": "object"},
        }
    },
    "now": {},
}
PARIS: Final = CompleteToolCall("weather", '{"city": "Paris", "days": 3}')
NOW: Final = CompleteToolCall("now", "{}")


def markup(calls: str | None = None, reasoning: str | None = None) -> OutputMarkup:
    forms = [
        find_format(calls, TOOL_CALL_FORMATS) if calls else None,
        find_format(reasoning, REASONING_FORMATS) if reasoning else None,
    ]
    whole = OutputMarkup()
    for form in forms:
        whole |= form.markup if form is not None else OutputMarkup()
    return whole


def parsed_pieces(
    both: OutputMarkup, pieces: list[str], *, thinking: bool = False
) -> tuple[list[OutputPart], int]:
    parser = OutputParser(both, SCHEMAS, thinking=thinking)
    parts: list[OutputPart] = []
    for piece in pieces:
        parts += parser.push(piece)
    return merge_parts(parts + parser.flush()), parser.malformed_calls


def parsed(both: OutputMarkup, text: str, *, thinking: bool = False) -> list[OutputPart]:
    return parsed_pieces(both, list(text), thinking=thinking)[0]


HERMES_CALL: Final = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
)
HERMES_NOW: Final = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
WRITTEN: Final[dict[str, list[tuple[str, list[OutputPart]]]]] = {
    "hermes": [
        (HERMES_CALL, [PARIS]),
        (f"Let me see.\n\n{HERMES_CALL}\n{HERMES_NOW}\n", [ContentDelta("Let me see."), PARIS, NOW]),
        (HERMES_CALL.removesuffix("</tool_call>"), [PARIS]),
        ('<tool_call>{"name": "now"}</tool_call> Done. ', [NOW, ContentDelta("Done. ")]),
        ('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', [NOW]),
        ("a < b <tool", [ContentDelta("a < b <tool")]),
        ("  no call\n", [ContentDelta("  no call\n")]),
    ],
    "qwen3_coder": [
        (
            (
                "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
                "</parameter>\n</function>\n</tool_call>"
            ),
            [PARIS],
        ),
        (
            (
                "<tool_call><function=weather><parameter=city>\n 3\n\n</parameter>"
                "<parameter=more>null</parameter>"
                '<parameter=where>{"a": [1]}</parameter></function></tool_call>'
            ),
            [CompleteToolCall("weather", '{"city": " 3\\n", "more": null, "where": {"a": [1]}}')],
        ),
    ],
    "glm45": [
        (
            (
                "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
                "<arg_value>3</arg_value>\n</tool_call>"
            ),
            [PARIS],
        ),
        ("<tool_call>now</tool_call>", [NOW]),
    ],
    "mistral": [
        (
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "now"}]',
            [PARIS, NOW],
        ),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}', [PARIS, NOW]),
        (
            'Yes.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris", "days": 3}',
            [ContentDelta("Yes."), PARIS],
        ),
        ('[TOOL_CALLS]weather{"city": "Paris", "days": 3}', [PARIS]),
    ],
    "llama3": [
        ('{"name": "weather", "parameters": {"city": "Paris", "days": 3}}', [PARIS]),
        ('<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now"}', [NOW, NOW]),
        ('{"name": "somebody", "parameters": {}}', [ContentDelta('{"name": "somebody", "parameters": {}}')]),
        (' It is {"a": 1}', [ContentDelta(' It is {"a": 1}')]),
        ('{"a": 1} is JSON.', [ContentDelta('{"a": 1} is JSON.')]),
    ],
    "pythonic": [
        ("[weather(city='Paris', days=3), now()]", [PARIS, NOW]),
        ("<|python_start|>[now()]<|python_end|>", [NOW]),
        ("[1] says so.", [ContentDelta("[1] says so.")]),
        ("[weather('Paris')]", [ContentDelta("[weather('Paris')]")]),
    ],
    "deepseek": [
        (
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
                '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
                "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            [PARIS, NOW],
        )
    ],
    "minimax_m2": [
        (
            (
                '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
                '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
                "</minimax:tool_call>"
            ),
            [PARIS, NOW],
        ),
    ],
    "deepseek_v32": [
        (
            (
                '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
                '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
                '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
                "</｜DSML｜function_calls>"
            ),
            [PARIS],
        )
    ],
    "kimi_k2": [
        (
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
                '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_calls_section_end|>'
            ),
            [PARIS],
        )
    ],
    "gemma4": [
        ('<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>', [PARIS]),
        (
            '<|tool_call>call:weather{city:<|"|>a "b", c: {d}<|"|>,where:{x:[1,true]}}<tool_call|>',
            [CompleteToolCall("weather", '{"city": "a \\"b\\", c: {d}", "where": {"x": [1, true]}}')],
        ),
        ("<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>", [PARIS]),
    ],
    "harmony": [
        (
            (
                "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary "
                'to=functions.weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
            ),
            [ReasoningDelta("They ask."), PARIS],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is so. ",
            [ReasoningDelta("Hm."), ContentDelta("It is so. ")],
        ),
        ("<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}", [NOW]),
    ],
}
CASES: Final = [
    pytest.param(name, text, parts, id=f"{name}-{index}")
    for name, cases in WRITTEN.items()
    for index, (text, parts) in enumerate(cases)
]


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_calls_are_read_as_each_kind_of_model_writes_them(
    name: str, text: str, parts: list[OutputPart]
) -> None:
    assert parsed(markup(name), text) == parts
    for part in parts:
        if isinstance(part, CompleteToolCall):
            assert isinstance(json.loads(part.arguments), dict)


MARKS: Final = sorted(
    {mark for form in (*TOOL_CALL_FORMATS, *REASONING_FORMATS) for mark in form.markup.marks}
)
PIECES: Final = st.lists(
    st.sampled_from(
        [*MARKS, HERMES_CALL, HERMES_NOW, "a", " ", "\n", "{", "}", '"', "now", "<", "<think", "{}"]
    )
    | st.sampled_from([text for cases in WRITTEN.values() for text, _ in cases]),
    max_size=8,
)
NAMES: Final = [form.names[0] for form in TOOL_CALL_FORMATS]


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    reasoning=st.sampled_from([None, *(form.names[0] for form in REASONING_FORMATS)]),
    pieces=PIECES,
    cuts=st.lists(st.integers(0, 400), max_size=6),
    thinking=st.booleans(),
)
def test_how_a_text_is_cut_changes_nothing(
    name: str, reasoning: str | None, pieces: list[str], cuts: list[int], thinking: bool
) -> None:
    both, text = markup(name, reasoning), "".join(pieces)
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    cut = [text[start:end] for start, end in pairwise(bounds)]
    assert parsed_pieces(both, cut, thinking=thinking) == parsed_pieces(both, list(text), thinking=thinking)


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "nothing",
        "[]",
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "now", "arguments": [1]}',
        '{"name": "now", "arguments": "no JSON"}',
        '{"name": "now", "arguments": {"a": NaN}}',
        '{"name": "now", "arguments": {"a": ' + "[" * 100_000,
        '{"name": "now", "arguments": {"a": ' + "1" * 10_000 + "}}",
        '{"name": "now"} and more',
        "<function=now",
    ],
    ids=lambda body: body[:40],
)
@pytest.mark.parametrize("end", ["</tool_call>", ""])
def test_what_is_no_call_stays_the_text_that_it_is(body: str, end: str) -> None:
    text = f"<tool_call>{body}{end}"
    assert parsed_pieces(markup("hermes"), [text, ""]) == ([ContentDelta(text)], 1)


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ("llama3", "pythonic")])
def test_no_argument_of_a_call_that_was_cut_off_is_made_up_or_left_out(name: str) -> None:
    """A limit of tokens may end an answer at any character."""
    text, parts = WRITTEN[name][0]
    whole = [part for part in parts if isinstance(part, CompleteToolCall)]
    for end in range(len(text)):
        called = [part for part in parsed(markup(name), text[:end]) if isinstance(part, CompleteToolCall)]
        assert called == whole[: len(called)], text[:end]


@pytest.mark.parametrize(
    ("text", "thinking", "parts"),
    [
        ("<think>\nHm.\n</think>\n\nYes. ", False, [ReasoningDelta("Hm."), ContentDelta("Yes. ")]),
        ("Hm.\n</think>\n\nYes.", True, [ReasoningDelta("Hm."), ContentDelta("Yes.")]),
        ("<think>\nHm.\n</think>\n\nYes.", True, [ReasoningDelta("Hm."), ContentDelta("Yes.")]),
        ("Hm, no end", True, [ReasoningDelta("Hm, no end")]),
        ("<think>Hm </thin", False, [ReasoningDelta("Hm </thin")]),
        ("\n</think>\n\nYes.", True, [ContentDelta("Yes.")]),
        ("Yes.\n", False, [ContentDelta("Yes.\n")]),
        (
            f"<think>I call {HERMES_NOW}.</think>{HERMES_NOW}",
            False,
            [ReasoningDelta(f"I call {HERMES_NOW}."), NOW],
        ),
    ],
)
def test_reasoning_is_separated_from_content(text: str, thinking: bool, parts: list[OutputPart]) -> None:
    assert parsed(markup("hermes", "think"), text, thinking=thinking) == parts


def test_text_is_returned_as_soon_as_it_can_be_no_mark() -> None:
    parser = OutputParser(markup("hermes", "think"), SCHEMAS)
    assert parser.push("Yes, <b>") == [ContentDelta("Yes, <b>")]
    assert parser.push(" and <tool") == [ContentDelta(" and")]
    assert parser.push("ing") == [ContentDelta(" <tooling")]
    parser = OutputParser(markup("hermes", "think"), SCHEMAS)
    assert parser.push("<think>Hm") == [ReasoningDelta("Hm")]
    assert parser.thinking
    assert parser.push("</think>") == []
    assert not parser.thinking
