"""Check whether any finite value can fit a JSON schema.

A schema that requires itself has no finite answer: a model would write until it is cut off. Types of values
that may fit are collected from the leaves up, until none is added (a least fixed point). An unsupported
keyword counts as fitting, so that only certain cases are refused. So does a malformed one, which compilation
refuses by name.

No I/O, clock or threads.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from baton.grammars.json_schema import TYPES, resolved, type_of

ALL: Final = frozenset(TYPES)
NONE: Final = frozenset[str]()

Types = frozenset[str]
"""Type of a set of JSON type names, such as "object", of which some finite value may fit a schema."""


def has_finite_value(schema: Any) -> bool:
    """Return whether a finite value may fit the JSON schema `schema`. The time for this is not bounded
    here."""
    search = _Search(schema)
    try:
        return search.finds()
    except RecursionError:
        return True


class _Search:
    """Search that finds which JSON types have finite values that fit one schema and each of its
    definitions."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, Types] = {}
        """JSON types for which a finite value was found so far in the target of each `$ref`, by the text of
        the `$ref`."""
        self._looked_at: set[str] = set()
        """`$ref` texts that the current pass over the schema has followed already, so that it does not follow
        them again."""
        self._has_grown = True

    def finds(self) -> bool:
        """Return whether a finite value fits the root schema. Passes over the schema are repeated until none
        finds a further type."""
        while self._has_grown:
            self._has_grown = False
            self._looked_at = {"#"}
            found = self._types(self._root)
            if found:
                return True
            self._learn("#", found)
        return False

    def _learn(self, reference: str, found: Types) -> None:
        self._has_grown |= found != self._known.get(reference, NONE)
        self._known[reference] = found

    def _types(self, schema: Any) -> Types:
        if not isinstance(schema, Mapping):
            return NONE if schema is False else ALL
        found = _types_by_name(schema) & _types_of_values(schema)
        if "object" in found and not ({"const", "enum"} & schema.keys() or self._has_object(schema)):
            found -= {"object"}
        if "array" in found and not ({"const", "enum"} & schema.keys() or self._has_array(schema)):
            found -= {"array"}
        if found and isinstance(schema.get("$ref"), str):
            found &= self._referred(schema["$ref"])
        for each in _list_at(schema, "allOf"):
            found = found and found & self._types(each)
        for word in ("anyOf", "oneOf"):
            if found and isinstance(schema.get(word), list):
                found &= NONE.union(*map(self._types, schema[word]))
        return found

    def _referred(self, reference: str) -> Types:
        target = resolved(self._root, reference)
        if target is None:
            return ALL
        if reference not in self._looked_at:
            self._looked_at.add(reference)
            self._learn(reference, self._types(target))
        return self._known.get(reference, NONE)

    def _has_object(self, schema: Mapping[str, Any]) -> bool:
        named, others = schema.get("properties"), schema.get("additionalProperties", True)
        named = named if isinstance(named, Mapping) else {}
        patterns = schema.get("patternProperties", {})
        required = {name for name in _list_at(schema, "required") if isinstance(name, str)}
        for name in required:
            if not (self._types(named[name]) if name in named else patterns or self._types(others)):
                return False
        more = _count_at(schema, "minProperties") - len(required)
        if more <= 0 or patterns or self._types(others):
            return True
        return _count(self._types(each) for name, each in named.items() if name not in required) >= more

    def _has_array(self, schema: Mapping[str, Any]) -> bool:
        least, items = _count_at(schema, "minItems"), schema.get("items", True)
        first = _list_at(schema, "prefixItems")
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        if not all(self._types(each) for each in first[:least]):
            return False
        return least <= len(first) or bool(self._types(items))


def _types_by_name(schema: Mapping[str, Any]) -> Types:
    """Return the types that the schema's own keyword `type` allows. Integers count as numbers.

    Returns all types if the keyword is missing or malformed.
    """
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(name in (*TYPES, "integer") for name in names):
        return ALL
    return frozenset("number" if name == "integer" else name for name in names)


def _types_of_values(schema: Mapping[str, Any]) -> Types:
    """Return the types of the values that a schema lists in `const` or `enum`, or all types if it lists
    none."""
    found = ALL
    if "const" in schema:
        found &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= set(map(type_of, schema["enum"]))
    return found


def _list_at(schema: Mapping[str, Any], word: str) -> list[Any]:
    value = schema.get(word)
    return value if isinstance(value, list) else []


def _count_at(schema: Mapping[str, Any], word: str) -> int:
    value = schema.get(word)
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else 0


def _count(found: Iterable[Types]) -> int:
    return sum(map(bool, found))
