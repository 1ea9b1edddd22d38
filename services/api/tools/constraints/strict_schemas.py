"""Schemas of objects without properties that the schema does not name.

A small model may add properties without end. xgrammar, which vLLM and SGLang use, forbids them as well. Where
several parts of a schema describe one object, each would forbid what another one names: such a schema stays
as it is.

Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from baton.grammars.json_schema import schemas_within, with_subschemas

TOGETHER: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas"})
"""Keywords with which a schema describes its object further."""
OPENING: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
)
"""Keywords that decide which properties an object may have in addition to the named ones."""


def without_unnamed_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema without unnamed properties, unless it asks for them."""
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
    """Return whether the schema names each property that it requires."""
    required = schema.get("required", ())
    return isinstance(required, list | tuple) and all(each in named for each in required)


def _has_several_parts(schema: Mapping[str, Any]) -> bool:
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return several or ("properties" in schema and bool(TOGETHER & schema.keys()))
