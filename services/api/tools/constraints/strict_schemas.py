"""Rewriting of JSON schemas so that objects have no properties that the schema does not name.

A small model may otherwise add properties without end. xgrammar, which vLLM and SGLang use, forbids them as
well. If several parts of a schema describe one object, each would forbid the properties that another one
names. Such a schema stays as it is.

No I/O, clock or threads.
"""

from collections.abc import Mapping
from typing import Any, Final

from baton.grammars.json_schema import schemas_within, with_subschemas

TOGETHER: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas"})
"""Schema keywords with which another subschema describes the same object. A schema that has one of them next
to `properties` is not rewritten."""
OPENING: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
)
"""Schema keywords by which an object schema itself states which properties it allows beyond the
named ones."""


def without_unnamed_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with unnamed properties forbidden in each object that does not itself allow them.

    A schema in which several parts describe one object is returned as it is.
    """
    if any(map(_has_several_parts, schemas_within(schema))):
        return schema
    made: Mapping[str, Any] = _rewritten(schema)
    return made


def _rewritten(schema: Any, _: object = None) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = with_subschemas(schema, _rewritten)
    named = made.get("properties")
    if not isinstance(named, Mapping) or OPENING & made.keys() or not _names_all(made, named):
        return made
    return {**made, "additionalProperties": False}


def _names_all(schema: Mapping[str, Any], named: Mapping[str, Any]) -> bool:
    """Return whether each property that a schema requires is in `named`, the properties with schemas of their
    own."""
    required = schema.get("required", ())
    return isinstance(required, list | tuple) and all(each in named for each in required)


def _has_several_parts(schema: Mapping[str, Any]) -> bool:
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return several or ("properties" in schema and bool(TOGETHER & schema.keys()))
