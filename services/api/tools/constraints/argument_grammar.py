"""How does a grammar write a call whose arguments stand one by one, and not as a JSON object?

Each under its name, in the order of the tool's properties: a text as the form has texts, all else as JSON.
What a schema says of its properties together has no place there.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from baton.api.tools.formats.json_calls import types_of

BRACKET: Final = "["
"""The mark of a list of calls, which is none of its own."""
TOGETHER: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    | {"title", "description", "$schema", "x-guidance"}
)
"""What a schema may say beside each of its properties."""
PLAIN: Final = frozenset({"type", "title", "description", "default", "examples"})
"""What that of a text may say."""
SHARED: Final = ("$defs", "definitions", "x-guidance")
"""What a property's own schema may refer to, or be read by."""


class InexpressibleArguments(ValueError):
    """The arguments of a tool cannot be written one by one."""


@dataclass(frozen=True, slots=True)
class ArgumentFormat:
    """As what calls are written."""

    mark: str
    before: str
    """The name."""
    behind: str
    key: tuple[str, str]
    """Around the name of an argument."""
    ends: str = ""
    """Behind each argument."""
    between: str = ""
    """Two arguments."""
    after: tuple[str, ...] = ()
    """The last."""
    text: tuple[str, str] | None = None
    """What stands around a text; None: texts are JSON's."""
    quotes: bool = True
    """Texts may be JSON's, too."""


GEMMA_4: Final = ArgumentFormat(
    "<|tool_call>",
    before="call:",
    behind="{",
    key=("", ":"),
    between=",",
    after=("}", "<tool_call|>"),
    text=('<|"|>', '<|"|>'),
)
ARGUED: Final[Mapping[str, tuple[ArgumentFormat, ...]]] = {
    "gemma": (
        GEMMA_4,
        replace(
            GEMMA_4,
            mark="<start_function_call>",
            after=("}", "<end_function_call>"),
            text=("<escape>", "<escape>"),
        ),
    ),
    "invoke": (
        ArgumentFormat(
            "<minimax:tool_call>",
            before='\n<invoke name="',
            behind='">\n',
            key=('<parameter name="', '">'),
            ends="\n",
            after=("</invoke>\n", "</minimax:tool_call>"),
            text=("", "</parameter>"),
            quotes=False,
        ),
    ),
    "pythonic": (ArgumentFormat(BRACKET, before="", behind="(", key=("", "="), between=", ", after=(")",)),),
}
"""By the form's name, each way in which models write it; of the others nothing is held."""


def argument_format(form: str, template: str) -> ArgumentFormat | None:
    """As a chat template writes them, or as there is one way alone; None: as nothing that is held."""
    ways = ARGUED.get(form, ())
    written = (way for way in ways if way.mark in template or way.mark == BRACKET)
    return next(written, None)


def call_rule(
    place: int,
    name: str,
    schema: Mapping[str, Any],
    form: ArgumentFormat,
    term: Callable[[str], str],
    rules: list[str],
) -> str:
    """A call behind its mark; `rules` are added to. Raises InexpressibleArguments."""
    if not set(schema) <= TOGETHER or schema.get("additionalProperties", True) not in (False, True):
        raise InexpressibleArguments("their schema says more than what each of them is")
    properties, required = schema.get("properties", {}), set(schema.get("required", ()))
    if not required <= set(properties):
        raise InexpressibleArguments("one is required that is not described")
    first, rest = f"first_{place}_{len(properties)}", f"rest_{place}_{len(properties)}"
    rules += [f'{first}: ""', f'{rest}: ""']
    for number, (key, own) in reversed([*enumerate(properties.items())]):
        item = f"item_{place}_{number}"
        rules.append(f"{item}: {_argument(item, key, own, schema, form, term, rules)}")
        skipped = f" | {{}}_{place}_{number + 1}" if key not in required else ""
        between = f"{json.dumps(form.between)} " if form.between else ""
        following = f"rest_{place}_{number + 1}"
        rules.append(f"first_{place}_{number}: {item} {following}{skipped.format('first')}")
        rules.append(f"rest_{place}_{number}: {between}{item} {following}{skipped.format('rest')}")
    behind = " ".join(term(each) for each in form.after)
    return f"{json.dumps(form.before + name + form.behind)} first_{place}_0 {behind}"


def _argument(
    item: str,
    key: str,
    own: Any,
    schema: Mapping[str, Any],
    form: ArgumentFormat,
    term: Callable[[str], str],
    rules: list[str],
) -> str:
    if not key.isidentifier() or not key.isascii() or not isinstance(own, Mapping):
        raise InexpressibleArguments("the name of one is no plain word")
    return f"{json.dumps(form.key[0] + key + form.key[1])} " + " ".join(
        _value(item, own, schema, form, term, rules)
    )


def _value(
    item: str,
    own: Mapping[str, Any],
    schema: Mapping[str, Any],
    form: ArgumentFormat,
    term: Callable[[str], str],
    rules: list[str],
) -> Iterator[str]:
    types = {*types_of({"": own}, "")}
    ends = json.dumps(form.ends) if form.ends else ""
    if form.text is not None and types == {"string"}:
        opens, closes = form.text
        values = own.get("enum", [own["const"]] if "const" in own else None)
        plain = set(own) <= PLAIN
        if plain or (values is not None and set(own) <= PLAIN | {"enum", "const"}):
            if opens:
                yield term(opens)
            yield up_to(closes, "argued", term, rules) if plain else _one_of(values, closes, term)
            yield ends
            return
    if not form.quotes and "string" in types:
        raise InexpressibleArguments("one is a text of a kind that could not be told from JSON")
    shared = {name: schema[name] for name in SHARED if name in schema}
    rules.append(f"{item}_value: %json {json.dumps({**own, **shared})}")
    yield f"{item}_value"
    if form.text is not None and not form.text[0]:
        yield term(form.text[1])
    yield ends


def _one_of(values: Any, closes: str, term: Callable[[str], str]) -> str:
    if any(closes in each for each in values):
        raise InexpressibleArguments("one holds the mark of its own end")
    return f"({' | '.join(map(json.dumps, values))}) {term(closes)}"


def up_to(mark: str, name: str, term: Callable[[str], str], rules: list[str]) -> str:
    """Any text, and behind it the mark, which is not in it. `name`: of the rule that is added, one for each
    mark."""
    ended = term(mark)
    if ended.startswith("<["):
        rules.append(f"{name.upper()}: /(?s:.+)/")
        return f"{name.upper()}? {ended}"
    rules.append(f"{name}[suffix={ended}]: /(?s:.*)/")
    return name
