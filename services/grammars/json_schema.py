"""Access to the subschemas of a JSON schema and to the targets of its references.

No I/O, clock or threads.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

BY_NAME: Final = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
"""JSON schema keywords whose value is an object of named subschemas, such as `properties`. The names are no
keywords."""
SINGLE: Final = frozenset(
    {"items", "additionalItems", "contains", "additionalProperties", "propertyNames"}
    | {"if", "then", "else", "not", "unevaluatedItems", "unevaluatedProperties"}
)
"""JSON schema keywords whose value is one subschema."""
LISTS: Final = frozenset({"items", "prefixItems", "allOf", "anyOf", "oneOf"})
"""JSON schema keywords whose value is a list of subschemas."""
TYPES: Final = ("null", "boolean", "object", "array", "number", "string")
"""Names of the types of JSON values. Integers count as numbers."""
IN_URI: Final = "$-_.~!*'()+,;=:@&"
"""Characters besides letters and digits that are not percent-encoded in the fragment of a URI."""

Pointer = tuple[str, ...]
"""A JSON pointer as a tuple of its reference tokens: keys and list indices."""


def with_subschemas(
    schema: Mapping[str, Any], change: Callable[[Any, Pointer], Any], at: Pointer = ()
) -> dict[str, Any]:
    """Return a copy of `schema` with `change` applied to each direct subschema.

    `at`: JSON pointer to `schema`. `change` gets a subschema and its pointer, and returns the new subschema.
    """
    made: dict[str, Any] = {}  # loops, since a comprehension takes a frame of the stack
    for word, value in schema.items():
        if isinstance(value, Mapping) and word in BY_NAME:
            named = made[word] = {}
            for name, each in value.items():
                named[name] = change(each, (*at, word, name))
        elif isinstance(value, list) and word in LISTS:
            listed = made[word] = []
            for index, each in enumerate(value):
                listed.append(change(each, (*at, word, str(index))))
        else:
            made[word] = change(value, (*at, word)) if word in SINGLE else value
    return made


def schemas_within(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield `schema` and all its subschemas that are objects."""
    open_schemas = [schema]
    while open_schemas:
        current = open_schemas.pop()
        if isinstance(current, Mapping):
            yield current
            with_subschemas(current, lambda each, _: open_schemas.append(each))


def pointer_of(reference: Any) -> Pointer | None:
    """Return the JSON pointer in a `$ref` within the same document, or None for any other reference."""
    if reference == "#":
        return ()
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    tokens = unquote(reference[2:]).split("/")
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in tokens)


def reference_to(pointer: Pointer) -> str:
    """Return the `$ref` of a JSON schema for a JSON pointer, encoded as in a URI."""
    tokens = (token.replace("~", "~0").replace("/", "~1") for token in pointer)
    return "/".join(("#", *(quote(token, safe=IN_URI) for token in tokens)))


def resolved(root: Any, reference: Any) -> Any:
    """Return the part of the document `root` to which the JSON schema `reference` points, or None if there is
    none."""
    pointer = pointer_of(reference)
    return None if pointer is None else found_at(root, pointer)


def found_at(root: Any, pointer: Pointer) -> Any:
    """Return the part of the document `root` to which the JSON `pointer` leads, or None if there is none."""
    found = root
    for token in pointer:
        if isinstance(found, Mapping):
            found = found.get(token)
        elif isinstance(found, list) and token.isdecimal() and int(token) < len(found):
            found = found[int(token)]
        else:
            return None
    return found


def types_in(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of types that a schema's own keyword `type` allows, or all. `number` includes
    `integer`."""
    given = schema.get("type", TYPES)
    return frozenset([given] if isinstance(given, str) else given)


def type_of(value: Any) -> str:
    """Return the name of a JSON value's type. An integer's type is `number`."""
    kinds = (
        (bool, "boolean"),
        (int | float, "number"),
        (str, "string"),
        (list, "array"),
        (Mapping, "object"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. `1` equals `1.0`, but not `true`."""
    return type_of(one) == type_of(other) and bool(one == other)


def is_anything(schema: Any) -> bool:
    """Return whether a schema visibly allows every value: it is `true` or empty. References are not
    followed."""
    return schema is True or schema == {}
