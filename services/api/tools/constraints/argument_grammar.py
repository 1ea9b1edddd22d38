"""Grammar of a tool call whose arguments are written one by one, and not as one JSON object.

Each argument follows its name, in the order of the tool's properties. A string is written as the model's
format writes strings, and any other value as JSON. A schema keyword that relates several properties to each
other cannot be expressed.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from baton.api.tools.formats.call_layouts import ArgumentLayout
from baton.api.tools.formats.json_calls import types_of

SEPARABLE: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    | {"title", "description", "$schema", "x-guidance"}
)
"""Keywords of a tool's schema that do not relate several properties. A tool with other keywords is refused.
"""
PLAIN: Final = frozenset({"type", "title", "description", "default", "examples"})
"""Schema keywords that do not restrict a string argument. A string with only these keywords may be
any text."""
SHARED: Final = ("$defs", "definitions", "x-guidance")
"""Keywords of a tool's schema that are copied into the schema of each single property, which may refer to
them."""


class InexpressibleArguments(ValueError):
    """Error: no grammar of arguments that are written one by one can express the schema of a tool."""


def call_rule(
    index: int,
    name: str,
    schema: Mapping[str, Any],
    layout: ArgumentLayout,
    term: Callable[[str], str],
    rules: list[str],
) -> str:
    """Return the grammar rule of a tool call after its opening mark, such as `<tool_call>`.

    The rules of its arguments are added to `rules`. `index`: index of the tool. `term`: function that writes
    a mark or a text as a grammar needs it. Raises InexpressibleArguments.
    """
    if not set(schema) <= SEPARABLE or schema.get("additionalProperties", True) not in (False, True):
        raise InexpressibleArguments("their schema says more than what each of them is")
    properties, required = schema.get("properties", {}), set(schema.get("required", ()))
    if not required <= set(properties):
        raise InexpressibleArguments("one is required that is not described")
    first, rest = f"first_{index}_{len(properties)}", f"rest_{index}_{len(properties)}"
    rules += [f'{first}: ""', f'{rest}: ""']
    for number, (key, own) in reversed([*enumerate(properties.items())]):
        item = f"item_{index}_{number}"
        rules.append(f"{item}: {_argument(item, key, own, schema, layout, term, rules)}")
        skipped = f" | {{}}_{index}_{number + 1}" if key not in required else ""
        between = f"{json.dumps(layout.between)} " if layout.between else ""
        following = f"rest_{index}_{number + 1}"
        rules.append(f"first_{index}_{number}: {item} {following}{skipped.format('first')}")
        rules.append(f"rest_{index}_{number}: {between}{item} {following}{skipped.format('rest')}")
    behind = " ".join(term(each) for each in layout.after)
    return f"{json.dumps(layout.before + name + layout.behind)} first_{index}_0 {behind}"


def _argument(
    item: str,
    key: str,
    own: Any,
    schema: Mapping[str, Any],
    layout: ArgumentLayout,
    term: Callable[[str], str],
    rules: list[str],
) -> str:
    if not key.isidentifier() or not key.isascii() or not isinstance(own, Mapping):
        raise InexpressibleArguments("the name of one is no plain word")
    return f"{json.dumps(layout.key[0] + key + layout.key[1])} " + " ".join(
        _value(item, own, schema, layout, term, rules)
    )


def _value(
    item: str,
    own: Mapping[str, Any],
    schema: Mapping[str, Any],
    layout: ArgumentLayout,
    term: Callable[[str], str],
    rules: list[str],
) -> Iterator[str]:
    types = {*types_of({"": own}, "")}
    ends = json.dumps(layout.ends) if layout.ends else ""
    if layout.text is not None and types == {"string"}:
        opens, closes = layout.text
        values = own.get("enum", [own["const"]] if "const" in own else None)
        plain = set(own) <= PLAIN
        if plain or (values is not None and set(own) <= PLAIN | {"enum", "const"}):
            if opens:
                yield term(opens)
            yield text_up_to(closes, "argued", term, rules) if plain else _one_of(values, closes, term)
            yield ends
            return
    if not layout.quotes and "string" in types:
        raise InexpressibleArguments("one is a text of a kind that could not be told from JSON")
    shared = {name: schema[name] for name in SHARED if name in schema}
    rules.append(f"{item}_value: %json {json.dumps({**own, **shared})}")
    yield f"{item}_value"
    if layout.text is not None and not layout.text[0]:
        yield term(layout.text[1])
    yield ends


def _one_of(values: Any, closes: str, term: Callable[[str], str]) -> str:
    if any(closes in each for each in values):
        raise InexpressibleArguments("one holds the mark of its own end")
    return f"({' | '.join(map(json.dumps, values))}) {term(closes)}"


def text_up_to(mark: str, name: str, term: Callable[[str], str], rules: list[str]) -> str:
    """Return the grammar expression for any text up to a mark, such as `</think>`, and the mark itself.

    `name`: name of the rule that is added to `rules`. `term`: function that writes a mark as a grammar needs
    it.
    """
    ended = term(mark)
    if ended.startswith("<["):
        rules.append(f"{name.upper()}: /(?s:.+)/")
        return f"{name.upper()}? {ended}"
    rules.append(f"{name}[suffix={ended}]: /(?s:.*)/")
    return name
