"""Replacement of `oneOf` by `anyOf` in JSON schemas where the alternatives exclude each other.

The grammar library takes a `oneOf` only if it finds that no value fits two of its alternatives. Unlike this
module, it does not follow references for that.

No I/O, clock or threads.
"""

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, Final

from baton.api.tools.constraints.schema_keywords import ANNOTATIONS
from baton.api.tools.constraints.schema_shapes import check_shape
from baton.grammars.json_schema import is_equal, types_in, with_subschemas

OPTIONS_MAX: Final = 64
"""Most alternatives of a `oneOf` that are compared, each with each. A longer `oneOf` is not replaced."""
DEPTH_MAX: Final = 4
"""Most levels of nested properties, and most references in a row, that are followed to compare two schemas.
"""

Resolve = Callable[[Any], Any]


def with_disjoint_alternatives(schema: Any, resolve: Resolve) -> Any:
    """Return the schema with each `oneOf` replaced by `anyOf` if its alternatives exclude each other.

    `resolve`: function that returns the target of a reference. Raises SchemaRefused.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = with_subschemas(schema, lambda each, _: with_disjoint_alternatives(each, resolve))
    options = made.get("oneOf", ())
    if not options or "anyOf" in made or len(options) > OPTIONS_MAX:
        return made
    if not all(_are_disjoint(one, other, resolve, DEPTH_MAX) for one, other in combinations(options, 2)):
        return made
    return {("anyOf" if word == "oneOf" else word): value for word, value in made.items()}


def _are_disjoint(one: Any, other: Any, resolve: Resolve, depth: int) -> bool:
    """Return whether it is certain that no value fits both schemas."""
    one, other = _followed(one, resolve), _followed(other, resolve)
    if one is False or other is False:
        return True
    if depth == 0 or not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return False
    check_shape(one)
    check_shape(other)
    types, others_types = _types(one), _types(other)
    if not types & others_types:
        return True
    values, others_values = _values(one), _values(other)
    if values is not None and others_values is not None:
        return not any(is_equal(value, each) for value in values for each in others_values)
    if types & others_types != {"object"}:
        return False
    required = {*one.get("required", ()), *other.get("required", ())}
    return any(
        _are_disjoint(_property(one, name), _property(other, name), resolve, depth - 1) for name in required
    )


def _followed(schema: Any, resolve: Resolve) -> Any:
    """Return the target of a schema that is only a `$ref`, and any other schema unchanged."""
    for _ in range(DEPTH_MAX):
        if not isinstance(schema, Mapping) or schema.keys() - ANNOTATIONS != {"$ref"}:
            break
        schema = resolve(schema["$ref"])
    return schema


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    types = types_in(schema)
    return types | {"integer"} if "number" in types else types


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema that an object schema has for its property `name`. True if patterns may apply."""
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
