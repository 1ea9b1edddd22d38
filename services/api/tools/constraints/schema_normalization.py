"""Normalization of JSON schemas: keywords that constrain nothing are dropped, others are rewritten.

The grammar library (llguidance) refuses each keyword that it does not support, whatever its value is. By JSON
Schema 2020-12 many of them constrain nothing: `uniqueItems: false`, `if` alone, `propertyNames` that allow
every name, an unknown format. Others can be expressed by keywords that the library supports. It refuses the
rest by name.

No I/O, clock or threads.
"""

from collections.abc import Mapping
from itertools import count
from typing import Any, Final

from baton.api.tools.constraints.property_names import ANY, NamesInexpressible, PropertyNamesReader
from baton.api.tools.constraints.schema_keywords import (
    Keywords,
    ruled,
    with_also,
    with_inferred_type,
    without,
)
from baton.api.tools.constraints.schema_shapes import SchemaRefused, check_shape
from baton.grammars.json_schema import (
    Pointer,
    found_at,
    is_anything,
    pointer_of,
    reference_to,
    resolved,
    schemas_within,
    with_subschemas,
)

DRAFTS: Final = ("/draft-04/", "/draft-06/", "/draft-07/", "/draft/2019-09/", "/draft/2020-12/")
"""Substrings by which the URI of a JSON Schema draft is recognised as known to the grammar library. A
`$schema` with any other URI is dropped, and the schema is read as 2020-12."""
MAY_BE_NULL: Final = frozenset({"const", "default"})
"""Schema keywords for which null is a meaningful value, so that it is not dropped."""
SAME_VALUE: Final = frozenset({"allOf", "anyOf", "then", "else", "dependentSchemas"})
"""Schema keywords whose subschemas apply to the same value as the schema that contains them."""
NEGATIVE: Final = frozenset({"not", "if", "oneOf", "propertyNames"})
"""Schema keywords whose subschemas exclude values or describe names, so that no type is inferred in them."""
DEPTH_MAX: Final = 128
"""Most levels of nested schemas in a request's schema. A deeper one is refused."""
INLINE_MAX: Final = 16
"""Most levels of nested schemas in the rewritten schema. Deeper ones become definitions, because the grammar
library reads JSON with at most 128 levels."""


def without_nulls(schema: Any, depth: int = 0) -> Any:
    """Return the schema without keywords that are null, which some generators write for absent ones.

    `depth`: number of schemas around this one. Raises SchemaRefused if schemas are nested too deep.
    """
    if depth > DEPTH_MAX:
        raise SchemaRefused(f"it is nested more than {DEPTH_MAX} schemas deep")
    if not isinstance(schema, Mapping):
        return schema
    given = {word: value for word, value in schema.items() if value is not None or word in MAY_BE_NULL}
    return with_subschemas(given, lambda each, _: without_nulls(each, depth + 1))


def normalized(schema: Mapping[str, Any]) -> Keywords:
    """Return an equivalent schema with keywords that the grammar library supports, as far as possible.

    `schema`: a schema without nulls. Raises SchemaRefused if no value fits it, or if it cannot be expressed.
    """
    return _Document(schema).normalized()


class _Document:
    """A JSON schema that is being normalized, with its definitions and the targets of its references."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._names = PropertyNamesReader(lambda reference: resolved(root, reference))
        self._moved: dict[Pointer, str] = {}
        """Name of the definition into which a too deeply nested subschema is moved, by the JSON pointer to
        the subschema."""
        self._definitions: Keywords = {}
        """Definitions that are added to the schema's `$defs`, by name."""
        self._numbers = count()
        """Numbers in the names of new definitions. Each is used once."""
        self._keeps_ids = False

    def normalized(self) -> Keywords:
        """Return the normalized schema with its new definitions. Raises SchemaRefused."""
        self._find_targets()
        made = self._rewritten(self._root, (), 0, infers=True)
        for pointer, name in [*self._moved.items()]:
            if name not in self._definitions:  # its schema is within an unknown keyword
                self._definitions[name] = self._rewritten(
                    found_at(self._root, pointer), pointer, 0, infers=True
                )
        if made is False:
            raise SchemaRefused("no value fits it")
        document: Keywords = made if isinstance(made, dict) else {}
        if self._definitions:
            document["$defs"] = {**document.get("$defs", {}), **self._definitions}
        return document

    def _find_targets(self) -> None:
        """Find the targets of references that are not in `$defs`, and choose a definition name for each of
        them."""
        open_schemas: list[Any] = [self._root]
        while open_schemas:
            for schema in schemas_within(open_schemas.pop()):
                check_shape(schema)
                if (reference := schema.get("$ref")) is None:
                    continue
                pointer, target = pointer_of(reference), resolved(self._root, reference)
                self._keeps_ids |= pointer is None
                if not pointer or pointer in self._moved or _is_definition(pointer):
                    continue
                if isinstance(target, Mapping | bool):
                    self._moved[pointer] = self._free_name()
                    open_schemas.append(target)

    def _schema(self, schema: Any, at: Pointer, depth: int, *, infers: bool) -> Any:
        """Return the rewritten subschema. If it is nested too deep, it becomes a definition, and a reference
        to it is returned.

        `at`: JSON pointer to the subschema. `depth`: number of schemas around it in its definition. `infers`:
        whether a missing type is inferred from the keywords.
        """
        if at not in self._moved:
            if depth < INLINE_MAX or isinstance(schema, bool):
                return self._rewritten(schema, at, depth, infers=infers)
            self._moved[at] = self._free_name()
        name = self._moved[at]
        self._definitions[name] = self._rewritten(schema, at, 0, infers=infers)
        return _reference_to(name)

    def _rewritten(self, schema: Any, at: Pointer, depth: int, *, infers: bool) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        is_typed = not infers or "type" in schema

        def change(each: Any, where: Pointer) -> Any:
            keyword = where[len(at)]
            inner = keyword not in NEGATIVE and not (is_typed and keyword in SAME_VALUE)
            return self._schema(each, where, depth + 1, infers=inner)

        made = with_subschemas(schema, change, at)
        if infers:
            made = with_inferred_type(made)
        if not self._keeps_ids:
            made = without(made, "$id")
        if not any(draft in made.get("$schema", DRAFTS[0]) for draft in DRAFTS):
            made = without(made, "$schema")
        if pointer := pointer_of(made.get("$ref")):
            moved = self._moved.get(pointer)
            made = {**made, "$ref": reference_to(pointer if moved is None else ("$defs", moved))}
        return ruled(self._with_names(made, schema.get("propertyNames", True)))

    def _with_names(self, schema: Keywords, wanted: Any) -> Keywords:
        """Express `propertyNames` by properties and patterns. Raises SchemaRefused if this is not possible.

        `wanted`: value of `propertyNames` in the request.
        """
        if "propertyNames" not in schema:
            return schema
        rest = without(schema, "propertyNames")
        try:
            names = self._names.names(wanted)
        except NamesInexpressible as error:
            raise SchemaRefused(str(error)) from None
        if names == ANY:
            return rest
        others, properties = rest.get("additionalProperties", True), rest.get("properties", {})
        if rest.get("patternProperties"):
            raise SchemaRefused("'propertyNames' beside 'patternProperties' is not supported")
        if len(names.literals) > 1 and not is_anything(others):
            others = self._shared(others)
        allowed = dict.fromkeys(names.literals, others)
        if names.pattern is None:
            named = {name: each if name in allowed else False for name, each in properties.items()}
            return {**rest, "properties": {**allowed, **named}, "additionalProperties": False}
        only: Keywords = {"patternProperties": {names.pattern: others}, "additionalProperties": False}
        if not properties:
            return {**rest, **({"properties": allowed} if allowed else {}), **only}
        if not is_anything(others):
            why = "with a pattern beside 'properties' and 'additionalProperties' is not supported"
            raise SchemaRefused(f"'propertyNames' {why}")
        return with_also(
            {**rest, **only, "properties": {**allowed, **properties}}, {**only, "properties": allowed}
        )

    def _shared(self, schema: Any) -> Keywords:
        """Store `schema` as a new definition that several properties can use, and return a reference to it. A
        schema that is a reference is returned as it is."""
        if isinstance(schema, Mapping) and schema.keys() == {"$ref"}:
            return {**schema}
        name = self._free_name()
        self._definitions[name] = schema
        self._moved[(name,)] = name
        return _reference_to(name)

    def _free_name(self) -> str:
        """Return a name for a new definition that no other definition in the schema has."""
        names = (f"schema_{number}" for number in self._numbers)
        return next(name for name in names if name not in self._root.get("$defs", {}))


def _is_definition(pointer: Pointer) -> bool:
    return len(pointer) == 2 and pointer[0] in ("$defs", "definitions")


def _reference_to(name: str) -> Keywords:
    return {"$ref": reference_to(("$defs", name))}
