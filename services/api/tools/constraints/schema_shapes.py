"""Checks that the keywords of a JSON schema have values of the right kind.

No I/O, clock or threads.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from baton.grammars.json_schema import BY_NAME, LISTS, SINGLE, TYPES

COUNTS: Final = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
    | {"minContains", "maxContains"}
)
"""Schema keywords whose value is a number of characters, items or properties."""
NAMED_TYPES: Final = (*TYPES, "integer")


class SchemaRefused(ValueError):
    """Error: no grammar can be made of a JSON schema. The message gives the reason."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and value >= 0


def _is_type(value: Any) -> bool:
    types = [value] if isinstance(value, str) else value
    return _are_texts(types) and len(types) > 0 and all(each in NAMED_TYPES for each in types)


def _is_one_schema_or_several(value: Any) -> bool:
    return _is_schema(value) or _are_schemas(value)


def _are_named_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_are_texts, value.values()))


def _are_dependencies(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_schema(each) or _are_texts(each) for each in value.values())


SHAPES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(SINGLE, (_is_schema, "a schema")),
    **dict.fromkeys(LISTS, (_are_schemas, "a list of schemas")),
    **dict.fromkeys(BY_NAME, (_are_named_schemas, "an object of schemas")),
    **dict.fromkeys(COUNTS, (_is_count, "a whole number, 0 or more")),
    **dict.fromkeys(("pattern", "format", "$ref", "$id", "$schema"), (_is_text, "a text")),
    "items": (_is_one_schema_or_several, "a schema"),
    "dependentRequired": (_are_named_texts, "an object of lists of texts"),
    "dependencies": (_are_dependencies, "an object of schemas or lists of texts"),
    "enum": (_is_list, "a list"),
    "required": (_are_texts, "a list of texts"),
    "type": (_is_type, f"one of {', '.join(NAMED_TYPES)}, or a list of them"),
}
"""Test of a schema keyword's value and a description of the expected value, for error messages, by keyword.
"""


def check_shape(schema: Mapping[str, Any]) -> None:
    """Raise SchemaRefused if a keyword of this schema has a value of the wrong kind. Subschemas are not
    checked."""
    for word, value in schema.items():
        if word in SHAPES and not SHAPES[word][0](value):
            raise SchemaRefused(f"'{word}' has to be {SHAPES[word][1]}")
