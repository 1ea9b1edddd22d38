"""Syntaxes in which tool calls follow their opening mark: how each begins, and parsers for those not in JSON.

No I/O, clock or threads.
"""

import re
from typing import Any, Final

from baton.api.tools.formats import tagged_calls
from baton.api.tools.formats.json_calls import call_of, json_value, pythonic, typed
from baton.api.tools.formats.tagged_calls import Argument, TagFormat
from baton.api.tools.parsing.output_markup import CallSyntax, ParsedCalls, PrefixMatch
from baton.api.tools.parsing.output_parts import CompleteToolCall, MalformedToolCall, ToolSchemas

TEXT_TYPES: Final = ("true", "string")
"""Values of an XML-like tag's type attribute that declare a string argument (DeepSeek, Kimi)."""
NAME_BEFORE_TAGS: Final = re.compile(rf"{tagged_calls.NAME}\s{{0,16}}")
BARE_NAME: Final = re.compile(r"<function=(?P<name>[^<>\s]{1,256})(?P<ends>\s{0,16}>\s{0,16})?")
PYTHON_END: Final = "<|python_end|>"
PYTHON_ENDS_MAX: Final = 8
"""Most `<|python_end|>` marks that are tried as the end of one list of tool calls in Python's notation.
Strings may contain the mark."""


def begins_with(text: str, *beginnings: str) -> PrefixMatch:
    """Return a PrefixMatch: whether the text begins with one of the texts `beginnings`, or is too short to
    decide."""
    if text.startswith(beginnings):
        return PrefixMatch.YES
    return PrefixMatch.PARTIAL if any(each.startswith(text) for each in beginnings) else PrefixMatch.NO


def _begins_as_json(text: str, _: ToolSchemas) -> PrefixMatch:
    return begins_with(text, "{", "[")


def _begins_with_name(text: str, _: ToolSchemas) -> PrefixMatch:
    """Return whether the text begins with a tool's name and a tag, as GLM's tool calls do."""
    found = NAME_BEFORE_TAGS.match(text)
    return PrefixMatch.NO if found is None else begins_with(text[found.end() :], "<arg_key>", "</tool_call>")


def _begins_bare(text: str, schemas: ToolSchemas) -> PrefixMatch:
    """Return whether the text begins with `<function=` and the name of an offered tool."""
    if begins_with(text, "<function=") is not PrefixMatch.YES:
        return begins_with(text, "<function=")
    found = BARE_NAME.match(text)
    if found is None:
        return PrefixMatch.PARTIAL if text == "<function=" else PrefixMatch.NO
    rest = text[found.end() :]
    if found["ends"] is None:
        known = any(name.startswith(found["name"]) for name in schemas)
        return PrefixMatch.PARTIAL if known and not rest.strip() else PrefixMatch.NO
    return begins_with(rest, "<parameter=", "</function>") if found["name"] in schemas else PrefixMatch.NO


def _value(argument: Argument, tool: str, schemas: ToolSchemas) -> Any:
    """Return the value of a tool call's argument, typed by its tag or by the tool's schema."""
    key, type_, text = argument
    if type_ in TEXT_TYPES:
        return text
    if type_ is None or type_ == "false":
        return typed(text, schemas, tool, key)
    try:
        return json_value(text)
    except MalformedToolCall:
        return text


def tag_syntax(tags: TagFormat) -> CallSyntax:
    """Return the syntax of tool calls that are written with these tags."""

    def begins(text: str, _: ToolSchemas) -> PrefixMatch:
        return begins_with(text, tags.begins)

    def parse_ahead(text: str, schemas: ToolSchemas, final: bool) -> ParsedCalls | None:
        keys = {name: schema.get("properties") or {} for name, schema in schemas.items()}
        reading = tagged_calls.read_calls(text, tags, keys, final=final)
        if reading is None:
            return None
        calls: list[CompleteToolCall] = []
        for name, arguments in reading.calls:
            needs_offer = tags.bare or not (arguments or tags.call_ends)
            if needs_offer and name not in schemas:
                return None
            given = {each.key: _value(each, name, schemas) for each in arguments}
            try:
                calls.append(call_of(name, given))
            except MalformedToolCall:
                return None
        rest = text[reading.end :].lstrip()
        cut = not reading.closed and begins_with(rest, tags.begins) is not PrefixMatch.NO
        return ParsedCalls(calls, len(text) if cut else reading.end)

    own = _begins_bare if tags.bare else begins if tags.begins else _begins_with_name
    return CallSyntax(own, parse_ahead)


def _read_python(text: str, schemas: ToolSchemas, final: bool) -> ParsedCalls | None:
    """Return the tool calls of a text in Python's notation. They end at the first `<|python_end|>` mark at
    which they are complete."""
    at = 0
    for _ in range(PYTHON_ENDS_MAX):
        at = text.find(PYTHON_END, at)
        if at < 0:
            break
        try:
            return ParsedCalls(pythonic("", text[:at], schemas), at + len(PYTHON_END))
        except MalformedToolCall:
            at += len(PYTHON_END)
    try:
        return ParsedCalls(pythonic("", text, schemas), len(text)) if final else None
    except MalformedToolCall:
        return None


JSON_OBJECTS: Final = CallSyntax(_begins_as_json)
TAGGED: Final = (JSON_OBJECTS, tag_syntax(tagged_calls.QWEN), tag_syntax(tagged_calls.GLM))
"""Syntaxes of tool calls after the mark `<tool_call>`. The text that follows decides which one it is."""
BARE: Final = (tag_syntax(tagged_calls.QWEN_BARE),)
INVOKED: Final = (tag_syntax(tagged_calls.MINIMAX),)
DSML: Final = (tag_syntax(tagged_calls.DSML),)
KIMI_K3: Final = (tag_syntax(tagged_calls.KIMI_K3),)
PYTHONIC: Final = (CallSyntax(parse_ahead=_read_python),)
