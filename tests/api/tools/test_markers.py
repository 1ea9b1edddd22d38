"""A mark of reasoning or of a tool call counts only where it can stand, in every format and every API."""

import json
import random
from collections.abc import Sequence
from typing import Any, Final

import httpx
import pytest

from baton.api.backend import Limits
from baton.api.tools.formats.output_formats import REASONING_FORMATS, TOOL_CALL_FORMATS, find_format
from baton.api.tools.parsing import output_parser
from baton.api.tools.parsing.mark_search import first_mark
from baton.api.tools.parsing.output_markup import OutputMarkup
from baton.api.tools.parsing.output_parser import OutputParser
from baton.api.tools.parsing.output_parts import (
    CompleteToolCall,
    ContentDelta,
    OutputPart,
    ReasoningDelta,
    merge_parts,
)
from baton.api.tools.parsing.text_after_calls import REPARSED_CHARS_MAX
from baton.api.tools.parsing.unread_text import PIECE_CHARS
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, chat
from tests.api.scripted import STOP, ScriptedBackend, batch

SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "w": {"properties": {"c": {"type": "string"}, "d": {"type": "string"}, "o": {"type": "object"}}},
}
HERMES_CALL: Final = '<tool_call>{"name": "w", "arguments": {"c": "x"}}'
KIMI_CALL: Final = '<|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>{"c": "x"}'
FORMATS: Final[dict[str, tuple[str, str, str, str]]] = {
    "hermes": ("hermes", '<tool_call>{"name": "w", "arguments": ', "%json", "}</tool_call>"),
    "llama3": ("llama3", '<|python_tag|>{"name": "w", "parameters": ', "%json", "}"),
    "mistral": ("mistral", "[TOOL_CALLS]w[ARGS]", "%json", ""),
    "mistral-list": ("mistral", '[TOOL_CALLS][{"name": "w", "arguments": ', "%json", "}]"),
    "deepseek": ("deepseek", "<｜tool▁call▁begin｜>w<｜tool▁sep｜>", "%json", "<｜tool▁call▁end｜>"),
    "kimi": (
        "kimi",
        "<|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>",
        "%json",
        "<|tool_call_end|>",
    ),
    "harmony": (
        "harmony",
        "<|channel|>commentary to=functions.w <|constrain|>json<|message|>",
        "%json",
        "<|call|>",
    ),
    "harmony-prompt": (
        "harmony",
        " to=functions.w<|channel|>commentary <|constrain|>json<|message|>",
        "%json",
        "",
    ),
    "pythonic": ("pythonic", "<|python_start|>[w(c=", "%text", ")]<|python_end|>"),
    "qwen": (
        "qwen3_coder",
        "<tool_call>\n<function=w>\n<parameter=c>\n",
        "%raw",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "qwen-bare": ("qwen3_coder", "<function=w>\n<parameter=c>\n", "%raw", "\n</parameter>\n</function>"),
    "glm": ("glm45", "<tool_call>w\n<arg_key>c</arg_key>\n<arg_value>", "%raw", "</arg_value>\n</tool_call>"),
    "minimax": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="w">\n<parameter name="c">',
        "%raw",
        "</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
    "deepseek_v32": (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="w">\n<｜DSML｜parameter name="c" string="true">',
        "%raw",
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "deepseek_v4": (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="w">\n<｜DSML｜parameter name="c" string="true">',
        "%raw",
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    "deepseek_v41": (
        "deepseek_v41",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="w">\n<｜DSML｜ parameter name="c" string="true">',
        "%raw",
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>",
    ),
    "kimi_k3": (
        "kimi_k3",
        (
            '<|open|>tools<|sep|><|open|>call tool="w" index="1"<|sep|>'
            '<|open|>argument key="c" type="string"<|sep|>'
        ),
        "%raw",
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "gemma": ("gemma", '<|tool_call>call:w{c:<|"|>', "%raw", '<|"|>}<tool_call|>'),
}
"""Format, text before the argument, notation of the argument, and text behind it, by syntax."""


QWEN: Final = "<tool_call><function=w>"
QWEN_END: Final = "</function></tool_call>"


def markup(name: str) -> OutputMarkup:
    calls, reasoning = (
        find_format(name, TOOL_CALL_FORMATS),
        find_format("harmony" if name == "harmony" else "think", REASONING_FORMATS),
    )
    assert calls is not None
    assert reasoning is not None
    return calls.markup | reasoning.markup


def parts_of(name: str, pieces: list[str], **how: Any) -> list[OutputPart]:
    parser = OutputParser(markup(name), SCHEMAS, **how)
    return merge_parts([part for piece in pieces for part in parser.push(piece)] + parser.flush())


def parsed(name: str, text: str, **how: Any) -> list[OutputPart]:
    """Parse a text, whole, by characters and in random pieces, which have to agree."""
    whole = parts_of(name, [text], **how)
    assert parts_of(name, list(text), **how) == whole
    chance = random.Random(text)
    for _ in range(4):
        cuts = sorted(chance.choices(range(len(text) + 1), k=5))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parts_of(name, pieces, **how) == whole
    return whole


def written(syntax: str, value: str) -> tuple[str, str]:
    """Return a call in a syntax, and the name of its format."""
    name, before, how, behind = FORMATS[syntax]
    shown = {
        "%json": json.dumps({"c": value}, ensure_ascii=False),
        "%text": json.dumps(value),
        "%raw": value,
    }[how]
    return before + shown + behind, name


def called(value: str) -> CompleteToolCall:
    return CompleteToolCall("w", json.dumps({"c": value}, ensure_ascii=False))


@pytest.mark.parametrize("syntax", FORMATS)
def test_an_argument_holds_each_mark_of_every_format(syntax: str) -> None:
    marks = {mark for each in (*TOOL_CALL_FORMATS, *REASONING_FORMATS) for mark in each.markup.marks}
    marks |= {"</parameter>", "<parameter=c>", "</arg_value>", "<arg_key>", "</invoke>", "</function>"}
    for mark in sorted(marks):
        for value in (f"a {mark} b", f"a {mark}", f"{mark} b", f'a "{mark}" b', f"\n{mark}\n."):
            text, name = written(syntax, value)
            if syntax == "gemma" and mark in ('<|"|>', "<escape>") and not value.endswith("b"):
                continue  # nothing tells it from the text's end
            assert parsed(name, text) == [called(value)], (mark, value)


@pytest.mark.parametrize("syntax", FORMATS)
def test_an_argument_holds_a_call_of_its_own_format(syntax: str) -> None:
    inner, name = written(syntax, "x")
    for value in (f"before {inner} behind", f"{inner} and {inner} behind"):
        text, _ = written(syntax, value)
        assert parsed(name, text) == [called(value)]
        if syntax not in ("llama3", "harmony", "harmony-prompt", "pythonic", "mistral-list"):
            assert parsed(name, f"{text}\n{text}") == [called(value), called(value)]


@pytest.mark.parametrize("syntax", FORMATS)
def test_an_argument_holds_what_could_end_its_call(syntax: str) -> None:
    behind = FORMATS[syntax][3]
    text, name = written(syntax, f"a {behind} b")
    assert parsed(name, text) == [called(f"a {behind} b")]


def test_an_argument_before_the_last_holds_what_could_end_its_call() -> None:
    end = "</parameter></function></tool_call>"
    text = f"<tool_call><function=w><parameter=c>a {end} b</parameter><parameter=d>1{end}"
    expected = [CompleteToolCall("w", json.dumps({"c": f"a {end} b", "d": "1"}))]
    assert parsed("hermes", text) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Use `<think>` and `</think>`.", [ContentDelta("Use `<think>` and `</think>`.")]),
        ("<think>Hm.</think>Now <think> again.", [ReasoningDelta("Hm."), ContentDelta("Now <think> again.")]),
        ("<think>Hm.</think><think>again", [ReasoningDelta("Hm."), ContentDelta("<think>again")]),
        ("<think>A <think> twice.</think>Yes.", [ReasoningDelta("A <think> twice."), ContentDelta("Yes.")]),
        ("Write <tool_call> to call.", [ContentDelta("Write <tool_call> to call.")]),
        ("Write <function=w> to call.", [ContentDelta("Write <function=w> to call.")]),
        ("<function=x><parameter=c>1</parameter>", [ContentDelta("<function=x><parameter=c>1</parameter>")]),
        ("<tool_call>", []),
        ("I will check.\n<tool_call>", [ContentDelta("I will check.\n")]),
        ("To call is `<tool_call>", [ContentDelta("To call is `<tool_call>")]),
        ("Write <tool_call>", [ContentDelta("Write <tool_call>")]),
    ],
)  # fmt: skip
def test_elsewhere_a_mark_is_text(text: str, parts: list[OutputPart]) -> None:
    assert parsed("hermes", text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "Use <|channel|> now",
        "<|channel|>",
        "Use `<|channel|>` and `<|start|>`.",
        "<|start|> begins, <|channel|>sorts",
        "Use <|channel|>final now",
        "`<|channel|>final` or `<|start|>assistant`",
        "a <|channel|>\nfinal",
        "a <|start|>x<|channel|> b " + "c" * 600,
    ],
)
def test_the_mark_of_a_head_is_text_where_no_head_follows(text: str) -> None:
    final = "<|channel|>final<|message|>"
    reasoning = f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"
    said = [ContentDelta(text)]
    assert parsed("harmony", f"{final}{text}<|return|>") == said
    assert parsed("harmony", f"{reasoning}{final}{text}<|return|>") == [ReasoningDelta(text), *said]
    if not text.endswith("<|channel|>"):
        assert parsed("harmony", f"Yes. {text}") == [ContentDelta(f"Yes. {text}")]
    call, _ = written("harmony", "x")
    assert parsed("harmony", f"{call}{final}{text}<|return|>") == [called("x"), *said]


@pytest.mark.parametrize(
    "head",
    [
        "<|channel|>analysis to=functions.w code<|message|>",
        "<|channel|>x to=functions.w<|message|>",
        "<|channel|>commentary to=functions.w<|constrain|>response<|message|>",
        "<|channel|> commentary  to=functions.w <|constrain|> json<|message|>",
        "<|start|>assistant<|channel|>commentary to=functions.w<|message|>",
        "<|start|>assistant to=functions.w<|channel|>commentary json<|message|>",
        "<|channel|>to=functions.w<|message|>",
    ],
)
def test_a_head_counts_behind_text_and_is_silent_where_it_is_cut_off(head: str) -> None:
    text = "<|channel|>final<|message|>Use <|channel|> now. "
    assert parsed("harmony", text + head + '{"c": "x"}') == [
        ContentDelta("Use <|channel|> now. "),
        called("x"),
    ]
    if "response" in head or ">x" in head:
        return
    for end in range(len("<|channel|>"), len(head)):
        assert parsed("harmony", text + head[:end])[0] == ContentDelta("Use <|channel|> now. "), head[:end]


@pytest.mark.parametrize(
    ("name", "before", "parts"),
    [
        ("hermes", "", []),
        ("hermes", "<think>Hm.</think>", [ReasoningDelta("Hm.")]),
        ("harmony", "<|channel|>final<|message|>", []),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>",
            [ReasoningDelta("Hm.")],
        ),
        ("mistral", "", []),
        ("kimi_k3", "", []),
    ],
)
def test_content_that_a_grammar_has_holds_every_mark(name: str, before: str, parts: list[OutputPart]) -> None:
    for mark in markup(name).marks:
        answer = json.dumps({"x": f"a {mark} b", mark: mark})
        assert parsed(name, before + answer, constrained=True) == [*parts, ContentDelta(answer)]


SECTIONS: Final = {
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
}
"""Marks around all calls of an answer, by format."""
RESPONSE: Final = "<|open|>response<|sep|>"
RESPONSE_END: Final = "<|close|>response<|sep|>"
MESSAGE: Final = '<|open|>message role="assistant"<|sep|>'
MESSAGE_END: Final = "<|close|>message<|sep|>"


@pytest.mark.parametrize("syntax", SECTIONS)
def test_a_mark_of_a_section_is_dropped_beside_a_call_and_is_text_elsewhere(syntax: str) -> None:
    begin, end = SECTIONS[syntax]
    call, name = written(syntax, "x")
    for prose in (f"Use {begin} and {end}.", f"{begin} opens.", f"a {end}", f"a {begin}", begin, end):
        assert parsed(name, prose) == [ContentDelta(prose)]
        assert parsed(name, f"<think>Hm.</think>{prose}") == [ReasoningDelta("Hm."), ContentDelta(prose)]
        assert parsed(name, f"{call}\nThen {prose}") == [called("x"), ContentDelta(f"Then {prose}")]
    for text in (f"{begin}{call}{end}", f" {begin}\n{call}\n{end}\n", f"{begin}{call}", f"{call}{end}"):
        assert parsed(name, text) == [called("x")]
        assert parsed(name, f"<think>Hm.</think>{text}") == [ReasoningDelta("Hm."), called("x")]
        assert parsed(name, f"Yes.{text}")[:2] == [ContentDelta("Yes."), called("x")]
    assert parsed(name, f"Yes. {begin}{call}{call}{end} No.") == [
        *(ContentDelta("Yes. "), called("x"), called("x"), ContentDelta(" No."))
    ]
    assert parsed(name, f"{begin}{end}") == []
    assert parsed(name, f"Yes. {begin}{end}") == [ContentDelta("Yes. ")]
    broken = call.replace("{", "[")
    assert parsed(name, f"{begin}{broken}{end}") == [ContentDelta(f"{begin}{broken}{end}")]
    far = " " * 300
    assert parsed(name, f"{begin}{far}{call}") == [ContentDelta(f"{begin}{far}"), called("x")]


def test_marks_around_content_are_dropped_around_an_answer_and_are_text_within() -> None:
    call, name = written("kimi_k3", "x")
    prose = f"Write {RESPONSE}, {RESPONSE_END}, {MESSAGE} or {MESSAGE_END} there."
    assert parsed(name, prose) == [ContentDelta(prose)]
    assert parsed(name, f"{call}{RESPONSE}{prose}") == [called("x"), ContentDelta(prose)]
    for before in ("", MESSAGE, RESPONSE, f"{MESSAGE}<think>Hm.</think>{RESPONSE}", f"\n{MESSAGE}{RESPONSE}"):
        reasoning = [ReasoningDelta("Hm.")] if "Hm." in before else []
        for behind in ("", RESPONSE_END, f"{RESPONSE_END}{MESSAGE_END}", f"{RESPONSE_END} {MESSAGE_END}"):
            assert (
                "".join(
                    each.text
                    for each in parsed(name, f"{before}{prose}{behind}")
                    if isinstance(each, ContentDelta)
                ).strip()
                == prose
            )
            parts = parsed(name, f"{before}{prose}{behind}{call}{MESSAGE_END}")
            assert [part for part in parts if not isinstance(part, ContentDelta)] == [*reasoning, called("x")]
            assert "".join(part.text for part in parts if isinstance(part, ContentDelta)).strip() == prose
    assert parsed(name, f"{RESPONSE}{RESPONSE_END}{call}") == [called("x")]
    quoted = f"Yes{RESPONSE_END} is its end."
    assert parsed(name, quoted) == [ContentDelta(quoted)]


def test_a_long_text_is_searched_a_bounded_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for each mark and string in all of the text would take the square of its length."""
    searched: list[int] = []

    def counted(text: str, marks: Sequence[str], *, last: bool) -> tuple[int, str | None]:
        searched.append(len(text))
        return first_mark(text, marks, last=last)

    monkeypatch.setattr(output_parser, "first_mark", counted)
    value = '"a" ' * 4000
    for text, part in (
        (written("hermes", value)[0], called(value)),
        ('<tool_call>{"name": "w", "arguments": {"o": [' + '"a", ' * 4000 + '""]}}', None),
        ("<tool_call> is a mark. " * 2000, None),
        ("<tool_call>{" + "<tool_call>" * 2000, None),
    ):
        parts = merge_parts(parts_of("hermes", [text]))
        assert part is None or parts == [part]
    assert max(searched) < 3 * PIECE_CHARS


def test_prose_about_marks_is_passed_on_at_once() -> None:
    parser = OutputParser(markup("hermes"), SCHEMAS)
    assert merge_parts(parser.push("Use <tool_call> to call")) == [ContentDelta("Use <tool_call> to call")]


@pytest.mark.parametrize(
    "syntax", [syntax for syntax in FORMATS if syntax not in ("llama3", "harmony", "harmony-prompt")]
)
def test_a_call_in_reasoning_that_nothing_closed_is_a_call(syntax: str) -> None:
    text, name = written(syntax, "x")
    reasoning = ReasoningDelta("I call it.")
    assert parsed(name, f"I call it.\n{text}\n", thinking=True)[:2] == [reasoning, called("x")]
    assert parsed(name, f"<think>I call it.\n{text}")[:2] in ([reasoning, called("x")], [called("x")])
    closed = f"I could write {text}, but no.</think>Yes."
    assert parsed(name, closed, thinking=True) == [
        ReasoningDelta(f"I could write {text}, but no."),
        ContentDelta("Yes."),
    ]
    closed = f"I could write {text}</think>Yes."
    assert parsed(name, closed, thinking=True) == [
        ReasoningDelta(f"I could write {text}"),
        ContentDelta("Yes."),
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a%sb", [ContentDelta("a"), called("x"), ContentDelta("\nb")]),
        ("a %s b", [ContentDelta("a "), called("x"), ContentDelta(" b")]),
        ("a\n%s\nb", [ContentDelta("a"), called("x"), ContentDelta("\n\nb")]),
        ("a\n\n%s\n", [ContentDelta("a"), called("x")]),
        ("%s\nb", [called("x"), ContentDelta("b")]),
        ("a\n%s\n%s\nb", [ContentDelta("a"), called("x"), called("x"), ContentDelta("\n\n\nb")]),
    ],
)
def test_text_before_and_behind_a_call_is_separate_content(text: str, parts: list[OutputPart]) -> None:
    call, _ = written("hermes", "x")
    assert parsed("hermes", text.replace("%s", call)) == parts


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (
            "gemma",
            "<|tool_call>call:w{key with space:1,o:{a b:[null]}}<tool_call|>",
            '{"key with space": 1, "o": {"a b": [null]}}',
        ),
        ("hermes", f"{QWEN}<parameter=o>{{'a': None}}</parameter>{QWEN_END}", '{"o": {"a": null}}'),
        ("hermes", f"{QWEN}<parameter=o>{{'a': (1, </parameter>{QWEN_END}", '{"o": "{\'a\': (1, "}'),
        ("hermes", f"{QWEN}<parameter=c>1\n<parameter=d>2</parameter>{QWEN_END}", '{"c": "1", "d": "2"}'),
        ("hermes", "<tool_call>{'name': 'w', 'arguments': {'a': None}}</tool_call>", '{"a": null}'),
        (
            "hermes",
            '<tool_call>{"name": "w", "arguments": {"c": "\\ud83d"}}</tool_call>',
            '{"c": "\ufffd"}',
        ),
    ],
)
def test_arguments_are_read_as_models_write_them(name: str, text: str, arguments: str) -> None:
    assert parsed(name, text) == [CompleteToolCall("w", arguments)]
    arguments.encode()


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("hermes", f"{HERMES_CALL}\n</tool", [called("x")]),
        ("hermes", f"{QWEN}<parameter=c>x</parameter></function>\n</tool_c", [called("x")]),
        ("hermes", f"<think>a{HERMES_CALL}</tool", [ReasoningDelta("a"), called("x")]),
        ("deepseek", '<｜tool▁call▁begin｜>w<｜tool▁sep｜>{"c": "x"}<｜tool', [called("x")]),
        ("kimi", f"{KIMI_CALL}<|tool_c", [called("x")]),
        ("gemma", '<|tool_call>call:w{c:<|"|>x<|"|>}<tool', [called("x")]),
        ("harmony", '<|channel|>x to=functions.w<|message|>{"c": "x"}<|ca', [called("x")]),
        ("hermes", f"{HERMES_CALL}\n{HERMES_CALL}</tool_call>", [called("x"), called("x")]),
        ("hermes", f"{HERMES_CALL}{HERMES_CALL}{HERMES_CALL}", [called("x")] * 3),
        ("kimi", f"{KIMI_CALL}{KIMI_CALL}<|tool_call_end|>", [called("x"), called("x")]),
        ("mistral", '[TOOL_CALLS]w[ARGS]{"c": "x"} and', [called("x"), ContentDelta("and")]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "w", "arguments": {"c": "x"}}]\nb [TOOL_CALLS]w{"c": "x"}',
            [called("x"), ContentDelta("b "), called("x")],
        ),
        (
            "llama3",
            '<|python_tag|>{"name": "w", "parameters": {"c": "x"}} and',
            [called("x"), ContentDelta("and")],
        ),
        ("hermes", f"{HERMES_CALL}}}</tool_call>", [ContentDelta(f"{HERMES_CALL}}}</tool_call>")]),
        ("hermes", f"{HERMES_CALL} and", [ContentDelta(f"{HERMES_CALL} and")]),
        (
            "hermes",
            '<tool_call>{"name": "w", "arguments": "{} x"} x',
            [ContentDelta('<tool_call>{"name": "w", "arguments": "{} x"} x')],
        ),
    ],
)
def test_json_ends_a_call_whose_mark_is_missing_or_cut_off(
    name: str, text: str, parts: list[OutputPart]
) -> None:
    assert parsed(name, text) == parts


def test_a_gemma_call_without_its_end_before_the_next_is_one() -> None:
    begin, end = '<|tool_call>call:w{c:<|"|>', '<|"|>}'
    for between in ("", "\n"):
        for last in ("", "<tool_call|>", "<tool"):
            for count in (2, 3):
                text = between.join([f"{begin}x{end}"] * count) + last
                assert parsed("gemma", text) == [called("x")] * count
    closed = f"{begin}x{end}<tool_call|>"
    assert parsed("gemma", f"{closed}{begin}x{end}{closed}") == [called("x")] * 3
    number = CompleteToolCall("w", '{"d": 3}')
    assert parsed("gemma", f"<|tool_call>call:w{{d:3}}{closed}") == [number, called("x")]
    nested = CompleteToolCall("w", '{"o": {"c": ["x"]}}')
    assert parsed("gemma", f'<|tool_call>call:w{{o:{{c:[<|"|>x<|"|>]}}}}{closed}') == [nested, called("x")]
    shown = f"a {end}<|tool_call> b"
    assert parsed("gemma", f"{begin}{shown}{end}<tool_call|>") == [called(shown)]


def test_a_gemma_text_without_its_quote_ends_before_the_next_call() -> None:
    begin, end = '<|tool_call>call:w{c:<|"|>', "}<tool_call|>"
    whole = f'{begin}y<|"|>{end}'
    for between in ("", "\n"):
        assert parsed("gemma", f"{begin}x{end}{between}{whole}") == [called("x"), called("y")]
        two = f"{begin}x{end}{between}{begin}z{end}{between}{whole}"
        assert parsed("gemma", two) == [called("x"), called("z"), called("y")]
    nested = CompleteToolCall("w", '{"o": {"c": ["f() {}"]}}')
    broken = f'<|tool_call>call:w{{o:{{c:[<|"|>f() {{}}]}}{end}'
    assert parsed("gemma", broken + whole) == [nested, called("y")]
    shown = f"x{end}<|tool_call>call:w is how a call begins"
    assert parsed("gemma", f'{begin}{shown}<|"|>{end}') == [called(shown)]
    assert parsed("gemma", f"{begin}x{end}") == [ContentDelta(f"{begin}x{end}")]


def test_calls_without_ends_are_read_again_up_to_a_bound() -> None:
    text = HERMES_CALL * (REPARSED_CHARS_MAX // len(HERMES_CALL) + 2)
    assert parsed("hermes", text) == [ContentDelta(text)]


async def answers(http: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Return content and reasoning of a whole and of a streamed answer."""
    found = []
    message = (await http.post(CHAT, json=chat(**body))).json()["choices"][0]["message"]
    found.append((message["content"] or "", message.get("reasoning_content") or ""))
    lines = (await http.post(CHAT, json=chat(**body, stream=True))).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    found.append(
        tuple("".join(each.get(key) or "" for each in deltas) for key in ("content", "reasoning_content"))  # type: ignore[arg-type]
    )
    return found


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_all_apis_have_content_with_marks(
    http: httpx.AsyncClient, backend: ScriptedBackend, step: int
) -> None:
    text = "Use `<think>` to open and `</think>` to close."
    ids = [*tiny.ids(text), tiny.END_ID]
    batches = [ids[at : at + step] for at in range(0, len(ids), step)]
    backend.known_limits = Limits(context_tokens=4000, prompt_tokens=3000, sequence_tokens=4000)
    backend.script = lambda _: [
        batch(each, STOP if index == len(batches) - 1 else None) for index, each in enumerate(batches)
    ]
    for content, reasoning in await answers(http, {}):
        assert (content, reasoning) == (text, "")
    ask = {"model": tiny.MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
    message = (await http.post("/v1/messages", json=ask)).json()
    assert message["content"] == [{"type": "text", "text": text}]
    streamed = (await http.post("/v1/messages", json=ask | {"stream": True})).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert (
        "".join(each["delta"].get("text", "") for each in events if each["type"] == "content_block_delta")
        == text
    )
    response = (await http.post("/v1/responses", json={"input": "hi"})).json()
    assert [item["content"][0]["text"] for item in response["output"]] == [text]
    streamed = (await http.post("/v1/responses", json={"input": "hi", "stream": True})).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta") == text


@pytest.mark.parametrize("streamed", [False, True])
async def test_half_of_a_character_in_an_argument_breaks_no_answer(
    http: httpx.AsyncClient, backend: ScriptedBackend, streamed: bool
) -> None:
    call = '<tool_call>{"name": "w", "arguments": {"c": "\\ud83d"}}</tool_call>'
    backend.known_limits = Limits(context_tokens=4000, prompt_tokens=3000, sequence_tokens=4000)
    backend.script = lambda _: [batch([*tiny.ids(call), tiny.END_ID], STOP)]
    parameters = {"type": "object", "properties": {"c": {"type": "string"}}}
    function = {"name": "w", "parameters": parameters}
    user = {"role": "user", "content": "hi"}
    asked: dict[str, dict[str, Any]] = {
        CHAT: chat(tools=[{"type": "function", "function": function}]),
        "/v1/messages": {
            "model": tiny.MODEL,
            "max_tokens": 99,
            "messages": [user],
            "tools": [{"name": "w", "input_schema": parameters}],
        },
        "/v1/responses": {"input": "hi", "tools": [{"type": "function", **function}]},
    }
    for route, body in asked.items():
        reply = await http.post(route, json=body | {"stream": streamed})
        assert reply.status_code == 200
        text = reply.content.decode("utf-8")
        assert "\ufffd" in text or "\\ufffd" in text
        assert "ud83d" not in text
        assert '"error"' not in text.replace('"error":null', "")
