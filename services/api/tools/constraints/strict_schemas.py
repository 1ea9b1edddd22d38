"""Which properties may an object have of which its schema names some, and says nothing of others?

None: a small model may write on for ever, and xgrammar, which vLLM and SGLang use, has it so. Where parts of
a schema speak of one object together, each would forbid what another one names: such a schema stays as it is.

Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from baton.grammars.json_schema import schemas_within, with_subschemas

TOGETHER: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas"})
"""Words that say more of the object of which a schema speaks."""
OPENING: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
)
"""Words beside `properties` that say which others there may be."""


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without properties that nobody named, where it does not ask for them."""
    if any(map(_speaks_together, schemas_within(schema))):
        return schema
    made: Mapping[str, Any] = _closed(schema)
    return made


def _closed(schema: Any, _: object = None) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = with_subschemas(schema, _closed)
    named = made.get("properties")
    if not isinstance(named, Mapping) or OPENING & made.keys() or not _names_all(made, named):
        return made
    return {**made, "additionalProperties": False}


def _names_all(schema: Mapping[str, Any], named: Mapping[str, Any]) -> bool:
    """Whether it names each property that it requires."""
    required = schema.get("required", ())
    return isinstance(required, list | tuple) and all(each in named for each in required)


def _speaks_together(schema: Mapping[str, Any]) -> bool:
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return several or ("properties" in schema and bool(TOGETHER & schema.keys()))
