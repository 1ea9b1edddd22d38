"""Which properties may an object have of which its schema names some, and says nothing of others?

None: a small model may write on for ever, and xgrammar, which vLLM and SGLang use, has it so. Where parts of
a schema speak of one object together, each would forbid what another one names: such a schema stays as it is.

Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

TOGETHER: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas"})
"""Words that say more of the object of which a schema speaks."""
OPENING: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
)
"""Words beside `properties` that say which others there may be."""
LITERAL: Final = frozenset({"const", "default", "enum", "examples"})
"""Words whose values are no schemas."""
BY_NAME: Final = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
"""Words whose values are schemas by names, which are no words."""


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without properties that nobody named, where it does not ask for them."""
    if any(map(_speaks_together, _within(schema))):
        return schema
    told: Mapping[str, Any] = _closed(schema)
    return told


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    told = {word: _inner(word, value, _closed) for word, value in schema.items()}
    named = told.get("properties")
    if not isinstance(named, Mapping) or OPENING & told.keys() or not _names_all(told, named):
        return told
    return {**told, "additionalProperties": False}


def _inner(word: str, value: Any, change: Callable[[Any], Any]) -> Any:
    if word in LITERAL:
        return value
    if word in BY_NAME and isinstance(value, Mapping):
        return {name: change(each) for name, each in value.items()}
    return change(value)


def _names_all(schema: Mapping[str, Any], named: Mapping[str, Any]) -> bool:
    """Whether it names each property that it requires."""
    required = schema.get("required", ())
    return isinstance(required, list | tuple) and all(each in named for each in required)


def _within(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every schema in it, itself too."""
    if isinstance(schema, list):
        for each in schema:
            yield from _within(each)
    elif isinstance(schema, Mapping):
        yield schema
        for word, value in schema.items():
            if word in BY_NAME and isinstance(value, Mapping):
                yield from _within([*value.values()])
            elif word not in LITERAL:
                yield from _within(value)


def _speaks_together(schema: Mapping[str, Any]) -> bool:
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return several or ("properties" in schema and bool(TOGETHER & schema.keys()))
