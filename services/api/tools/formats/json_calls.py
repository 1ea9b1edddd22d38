"""Parsers of tool calls in JSON and in Python's notation, one for each format.

A model's text is unchecked input. Each parser returns its tool calls, or raises MalformedToolCall.

No I/O, clock or threads.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from baton.api.tools.parsing.output_parts import CompleteToolCall, MalformedToolCall, ToolSchemas

PYTHON_CHARS_MAX: Final = 64 * 2**10
"""Most characters of tool calls in Python's notation. Python's parser takes hundreds of bytes of memory for
each."""
ARGUMENTS: Final = ("arguments", "parameters")
RECIPIENT: Final = re.compile(r"to=functions\.([\w.-]+)")
NAMED: Final = re.compile(r"\s*([\w.-]+)\s*(?=[{\[])", re.DOTALL)
CALLED: Final = re.compile(r"([\w.-]+)\(")
KEYED: Final = re.compile(r"(?:, )?(\w+)=")
ENDED: Final = re.compile(r"\)(?:, |(\]))")
DEEPSEEK_SEP: Final = "<｜tool▁sep｜>"
KIMI_SEP: Final = "<|tool_call_argument_begin|>"
SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Pattern of one half of a surrogate pair. UTF-8 cannot encode it, and clients' parsers refuse its escape."""
FENCE: Final = re.compile(r"^\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*$", re.DOTALL)


class TextAfterCall(MalformedToolCall):
    """Error: text follows a tool call in JSON. The attribute `rest` is the text that follows."""

    def __init__(self, rest: str) -> None:
        super().__init__(rest)
        self.rest = rest


decoder: Final = json.JSONDecoder(strict=False, parse_constant=lambda word: _fail(word))


def objects(_: str, body: str, __: ToolSchemas) -> list[CompleteToolCall]:
    """Parse tool calls that are JSON objects, or lists of them, in a row (Hermes, Qwen)."""
    return _objects(body)


def bare(_: str, body: str, schemas: ToolSchemas) -> list[CompleteToolCall]:
    """Parse tool calls that are JSON objects without a tag (Llama 3). Each has to name an offered tool."""
    calls = _objects(body)
    if any(call.name not in schemas for call in calls):
        _fail(body)
    return calls


def pythonic(_: str, body: str, schemas: ToolSchemas) -> list[CompleteToolCall]:
    """Parse tool calls in Python's notation, such as `[f(a=1), g(b="x")]` (Llama 4)."""
    if len(body) > PYTHON_CHARS_MAX:
        _fail(body)
    try:
        calls = _argued(body.strip())
    except MalformedToolCall:
        calls = _python_calls(body.strip())
    if any(call.name not in schemas for call in calls):
        _fail(body)
    return calls


def mistral(_: str, body: str, __: ToolSchemas) -> list[CompleteToolCall]:
    """Parse Mistral's tool calls: a list of JSON objects, or `name[ARGS]{…}`."""
    text = body.lstrip()
    if text.startswith("["):
        return _objects(text)
    name, mark, arguments = text.partition("[ARGS]")
    if not mark:
        name, arguments = _named(text)
    return [call_of(name.partition("[CALL_ID]")[0].strip(), _object(arguments))]


def deepseek(_: str, body: str, __: ToolSchemas) -> list[CompleteToolCall]:
    """Parse a tool call of DeepSeek: `name<｜tool▁sep｜>{…}`.

    The older form has `function` in the place of the name, and then the name and the arguments in a code
    fence.
    """
    before, mark, after = body.partition(DEEPSEEK_SEP)
    if not mark:
        _fail(body)
    if before.strip() != "function":
        return [call_of(before.strip(), _object(after))]
    name, _line_end, arguments = after.partition("\n")
    fenced = FENCE.match(arguments)
    return [call_of(name.strip(), _object(fenced[1] if fenced else arguments))]


def kimi(_: str, body: str, __: ToolSchemas) -> list[CompleteToolCall]:
    """Parse a tool call of Kimi K2: `functions.name:0<|tool_call_argument_begin|>{…}`."""
    name, mark, arguments = body.partition(KIMI_SEP)
    if not mark:
        _fail(body)
    return [call_of(name.strip().removeprefix("functions.").partition(":")[0], _object(arguments))]


def harmony(head: str, body: str, _: ToolSchemas) -> list[CompleteToolCall]:
    """Parse a tool call of gpt-oss: a message whose head (header) has `to=functions.name`."""
    to = RECIPIENT.search(head)
    return [call_of("" if to is None else to[1], _object(body))]


def _fail(text: str) -> NoReturn:
    raise MalformedToolCall(text)


def decoded(text: str, at: int = 0) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, at)
    except MalformedToolCall:
        raise
    except (ValueError, RecursionError) as error:
        raise MalformedToolCall(text) from error


def _objects(text: str) -> list[CompleteToolCall]:
    """Return the tool calls of a text that is a sequence of JSON objects, or lists of them. Raises
    MalformedToolCall."""
    calls: list[CompleteToolCall] = []
    at = _skip(text, 0)
    while at < len(text):
        try:
            value, end = decoded(text, at)
            more = calls_of(value)
        except MalformedToolCall:
            if calls:
                raise TextAfterCall(text[end:]) from None
            more, end = calls_of(_python_value(text)), len(text)
        calls += more
        at = _skip(text, end)
    return calls or _fail(text)


def _python_value(text: str) -> Any:
    """Return the value of an object or a list in Python's notation. Raises MalformedToolCall."""
    stripped = text.strip()
    if len(stripped) > PYTHON_CHARS_MAX or not stripped.startswith(("{", "[")):
        _fail(text)
    try:
        return ast.literal_eval(stripped)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedToolCall(text) from error


def _skip(text: str, at: int) -> int:
    while at < len(text) and (text[at].isspace() or text[at] in ",;"):
        at += 1
    return at


def calls_of(value: Any) -> list[CompleteToolCall]:
    """Return the tool calls in a JSON value, which is one call or a list. Raises MalformedToolCall."""
    return [_of_object(each) for each in (value if isinstance(value, list) else [value])]


def _of_object(value: Any) -> CompleteToolCall:
    if not isinstance(value, dict):
        _fail(str(type(value)))
    if isinstance(value.get("function"), dict):
        value = value["function"]
    given: Any = next((value[each] for each in ARGUMENTS if each in value), {})
    if isinstance(given, str):
        given = _object(given)
    return call_of(value.get("name"), {} if given is None else given)


def _object(text: str) -> Any:
    started = text.lstrip()
    value, end = decoded(started)
    if started[end:].strip():
        raise TextAfterCall(started[end:])
    return value


def _named(text: str) -> tuple[str, str]:
    """Split `name{…}` into the tool's name and the text of its arguments. Raises MalformedToolCall."""
    found = NAMED.match(text)
    return (found[1], text[found.end() :]) if found else _fail(text)


def call_of(name: Any, arguments: Any) -> CompleteToolCall:
    """Return a tool call with this name and arguments, unchecked values from a model's text. Raises
    MalformedToolCall if they are no text and no JSON object."""
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        _fail(str(name))
    try:
        name.encode()
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise MalformedToolCall(name) from error
    return CompleteToolCall(name, SURROGATE.sub("\ufffd", written))


def _argued(text: str) -> list[CompleteToolCall]:
    """Return the tool calls of a text such as `[f(a=1), g(b="x")]` whose values are JSON instead of Python's
    notation. A grammar makes a model write them so."""
    calls: list[CompleteToolCall] = []
    at = 1
    while text.startswith("[") and (named := CALLED.match(text, at)):
        given: dict[str, Any] = {}
        at = named.end()
        while key := KEYED.match(text, at):
            given[key[1]], at = decoded(text, key.end())
        ends = ENDED.match(text, at)
        if ends is None:
            break
        calls.append(call_of(named[1], given))
        at = ends.end()
        if ends[1] == "]" and at == len(text):
            return calls
    return _fail(text)


def _python_calls(text: str) -> list[CompleteToolCall]:
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            _fail(text)
        return [_python_call(each) for each in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedToolCall(text) from error


def _python_call(node: ast.expr) -> CompleteToolCall:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        _fail("no call with names")
    return call_of(
        ast.unparse(node.func), {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    )


def typed(text: str, schemas: ToolSchemas, name: str, key: str) -> Any:
    """Return the value of an argument written without quotes: a string or JSON, by the tool's schema.

    `name`: name of the tool. `key`: name of the argument.
    """
    types = set(types_of(schemas.get(name, {}).get("properties"), key))
    if "string" in types and types <= {"string"}:
        return text
    try:
        value = json_value(text)
    except MalformedToolCall:
        if "string" in types or not types & {"object", "array"}:
            return text
        try:
            value = _python_value(text)
            json.dumps(value, allow_nan=False)
        except (MalformedToolCall, TypeError, ValueError, RecursionError):
            return text
    if "string" in types and not any(isinstance(value, PYTHON.get(each, ())) for each in types):
        return text
    return value


def json_value(text: str) -> Any:
    """Return the value of a JSON text, or of Python's True, False or None. Raises MalformedToolCall."""
    stripped = text.strip()
    words = {"True": True, "False": False, "None": None}
    return words[stripped] if stripped in words else _object(stripped)


PYTHON: Final[Mapping[str, tuple[type, ...]]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
}


def types_of(properties: Any, key: str) -> Iterator[str]:
    """Yield the types that the schema of the property `key` allows, without those of referenced schemas."""
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return
    several: Sequence[Any] = [schema]
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            several = [*several, *schema[word]]
    for each in several:
        types = each.get("type") if isinstance(each, Mapping) else None
        yield from (one for one in (types if isinstance(types, list) else [types]) if isinstance(one, str))
        values = each.get("enum") if isinstance(each, Mapping) else None
        if types is None and isinstance(values, list) and all(isinstance(one, str) for one in values):
            yield "string"
