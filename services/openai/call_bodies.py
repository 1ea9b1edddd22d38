"""How tool calls begin behind their mark, and how they are read where they are not JSON.

Pure.
"""

import re
from typing import Any, Final

from baton.openai import tag_calls
from baton.openai.call_forms import call_of, json_value, pythonic, typed
from baton.openai.output_parts import Call, Schemas, Unreadable
from baton.openai.output_regions import CallBody, CallStart, ReadAhead
from baton.openai.tag_calls import Argument, TagFormat

TEXT_TYPES: Final = ("true", "string")
"""Types of an argument that say it is a text, as DeepSeek's and Kimi's tags have them."""
NAME_BEFORE_TAGS: Final = re.compile(rf"{tag_calls.NAME}\s{{0,16}}")
BARE_NAME: Final = re.compile(r"<function=(?P<name>[^<>\s]{1,256})(?P<ends>\s{0,16}>\s{0,16})?")
PYTHON_END: Final = "<|python_end|>"
PYTHON_ENDS_MAX: Final = 8
"""Most marks of the end of one list of calls in Python's notation, those in its texts included."""


def begins_with(text: str, *beginnings: str) -> CallStart:
    """Whether the text begins with one of these."""
    if text.startswith(beginnings):
        return CallStart.YES
    return CallStart.PERHAPS if any(each.startswith(text) for each in beginnings) else CallStart.NO


def _begins_as_json(text: str, _: Schemas) -> CallStart:
    return begins_with(text, "{", "[")


def _begins_with_name(text: str, _: Schemas) -> CallStart:
    """The tool's name, and a tag behind it (GLM)."""
    found = NAME_BEFORE_TAGS.match(text)
    return CallStart.NO if found is None else begins_with(text[found.end() :], "<arg_key>", "</tool_call>")


def _begins_bare(text: str, schemas: Schemas) -> CallStart:
    """A function that is offered, whose mark is missing."""
    if begins_with(text, "<function=") is not CallStart.YES:
        return begins_with(text, "<function=")
    found = BARE_NAME.match(text)
    if found is None:
        return CallStart.PERHAPS if text == "<function=" else CallStart.NO
    rest = text[found.end() :]
    if found["ends"] is None:
        known = any(name.startswith(found["name"]) for name in schemas)
        return CallStart.PERHAPS if known and not rest.strip() else CallStart.NO
    return begins_with(rest, "<parameter=", "</function>") if found["name"] in schemas else CallStart.NO


def _value(argument: Argument, tool: str, schemas: Schemas) -> Any:
    """An argument, as its tag or the tool's schema has it."""
    key, type_, text = argument
    if type_ in TEXT_TYPES:
        return text
    if type_ is None or type_ == "false":
        return typed(text, schemas, tool, key)
    try:
        return json_value(text)
    except Unreadable:
        return text


def tag_body(tags: TagFormat) -> CallBody:
    """Calls between these tags."""

    def begins(text: str, _: Schemas) -> CallStart:
        return begins_with(text, tags.begins)

    def read_ahead(text: str, schemas: Schemas, final: bool) -> ReadAhead | None:
        keys = {name: schema.get("properties") or {} for name, schema in schemas.items()}
        reading = tag_calls.read_calls(text, tags, keys, final=final)
        if reading is None:
            return None
        calls: list[Call] = []
        for name, arguments in reading.calls:
            needs_offer = tags.bare or not (arguments or tags.call_ends)
            if needs_offer and name not in schemas:
                return None
            given = {each.key: _value(each, name, schemas) for each in arguments}
            try:
                calls.append(call_of(name, given))
            except Unreadable:
                return None
        rest = text[reading.end :].lstrip()
        cut = not reading.closed and begins_with(rest, tags.begins) is not CallStart.NO
        return ReadAhead(calls, len(text) if cut else reading.end)

    own = _begins_bare if tags.bare else begins if tags.begins else _begins_with_name
    return CallBody(own, read_ahead)


def _read_python(text: str, schemas: Schemas, final: bool) -> ReadAhead | None:
    """Calls in Python's notation, up to the first mark of their end at which they are whole."""
    at = 0
    for _ in range(PYTHON_ENDS_MAX):
        at = text.find(PYTHON_END, at)
        if at < 0:
            break
        try:
            return ReadAhead(pythonic("", text[:at], schemas), at + len(PYTHON_END))
        except Unreadable:
            at += len(PYTHON_END)
    try:
        return ReadAhead(pythonic("", text, schemas), len(text)) if final else None
    except Unreadable:
        return None


JSON_OBJECTS: Final = CallBody(_begins_as_json)
TAGGED: Final = (JSON_OBJECTS, tag_body(tag_calls.QWEN), tag_body(tag_calls.GLM))
"""Behind `<tool_call>`. Which one it is the text itself tells."""
BARE: Final = (tag_body(tag_calls.QWEN_BARE),)
INVOKED: Final = (tag_body(tag_calls.MINIMAX),)
DSML: Final = (tag_body(tag_calls.DSML),)
KIMI_K3: Final = (tag_body(tag_calls.KIMI_K3),)
PYTHONIC: Final = (CallBody(read_ahead=_read_python),)
