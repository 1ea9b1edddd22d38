"""Property names that a `propertyNames` schema allows, as a set of literals and a regular expression.

The grammar library does not support `propertyNames`. It is expressed by `properties`, `patternProperties` and
`additionalProperties`.

No I/O, clock or threads.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from baton.grammars.json_schema import is_anything, types_in

UNREADABLE: Final = frozenset({"not", "if", "$dynamicRef"})
"""Keywords of a `propertyNames` schema that are not supported. A schema with one of them is refused."""
DATE: Final = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS: Final[Mapping[str, str]] = {
    "date": f"^{DATE}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DATE}T{TIME}$",
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
"""Regular expression of a property name, by the `format` of the name. In any other format every name fits."""
REFERENCES_MAX: Final = 256
"""Most references that are followed to read all `propertyNames` schemas of one document. A document with more
is refused."""


class NamesInexpressible(ValueError):
    """Error: no grammar can express the allowed property names. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class PropertyNames:
    """Set of property names: those in `literals`, and those that the regular expression `pattern` finds.

    A caller's pattern is never tried here, because Python's search can take time without a bound.
    """

    literals: tuple[str, ...] = ()
    pattern: str | None = None


ANY: Final = PropertyNames(pattern="")
"""Set of all property names."""
NONE: Final = PropertyNames()
WORD: Final = "'propertyNames'"


class PropertyNamesReader:
    """Reader of the property names that the `propertyNames` schemas of one document allow."""

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        """Create a reader for the `propertyNames` schemas of one JSON schema document.

        `resolve`: function that returns the target of a reference.
        """
        self._resolve = resolve
        self._left = REFERENCES_MAX

    def names(self, schema: Any) -> PropertyNames:
        """Return the set of property names that the `propertyNames` schema `schema` allows. Raises
        NamesInexpressible."""
        if is_anything(schema):
            return ANY
        if not isinstance(schema, Mapping) or "string" not in types_in(schema):
            return NONE
        if unknown := UNREADABLE & schema.keys():
            raise NamesInexpressible(f"{WORD} with '{min(unknown)}' is not supported")
        found = _of_own_keywords(schema)
        if "$ref" in schema:
            found = _both(found, self._referred(schema["$ref"]))
        for each in schema.get("allOf", ()):
            found = _both(found, self.names(each))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                found = _both(found, _either([*map(self.names, schema[word])], once=word == "oneOf"))
        return found

    def _referred(self, reference: str) -> PropertyNames:
        self._left -= 1
        if self._left < 0:
            raise NamesInexpressible(f"{WORD} follows more than {REFERENCES_MAX} references")
        return self.names(self._resolve(reference))


def _of_own_keywords(schema: Mapping[str, Any]) -> PropertyNames:
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    most = None if most is None else int(most)
    form = FORMATS.get(schema.get("format", ""))
    found = _literals([schema["const"]]) if "const" in schema else ANY
    if "enum" in schema:
        found = _both(found, _literals(schema["enum"]))
    if found != ANY:
        fit = (name for name in found.literals if least <= len(name) <= (len(name) if most is None else most))
        found = PropertyNames(tuple(name for name in fit if form is None or re.search(form, name)))
    else:
        if least or most is not None:
            found = PropertyNames(pattern=f"^(?s:.){{{least},{'' if most is None else most}}}$")
        if form is not None:
            found = _both(found, PropertyNames(pattern=form))
    return _both(found, PropertyNames(pattern=schema["pattern"])) if "pattern" in schema else found


def _literals(values: Any) -> PropertyNames:
    return PropertyNames(tuple(dict.fromkeys(value for value in values if isinstance(value, str))))


def _both(one: PropertyNames, other: PropertyNames) -> PropertyNames:
    """Return the set of property names that are in both sets. Raises NamesInexpressible."""
    if ANY in (one, other) or one == other:
        return other if one == ANY else one
    if one.pattern is None and other.pattern is None:
        return PropertyNames(tuple(name for name in one.literals if name in other.literals))
    if NONE in (one, other):
        return NONE
    raise NamesInexpressible(f"{WORD} with several patterns, lengths, formats or lists is not supported")


def _either(some: list[PropertyNames], *, once: bool) -> PropertyNames:
    """Return the set of property names that are in any of these sets. Raises NamesInexpressible.

    `once`: whether a name has to be in exactly one of the sets, as for `oneOf`.
    """
    if ANY in some and not once:
        return ANY
    literals = [name for each in some for name in each.literals]
    patterns = [each.pattern for each in some if each.pattern is not None]
    if once and (len(literals) > len(set(literals)) or (patterns and len(some) > 1)):
        raise NamesInexpressible(f"{WORD} with a 'oneOf' of which several may hold is not supported")
    pattern = (
        "|".join(f"(?:{each})" for each in patterns) if len(patterns) > 1 else next(iter(patterns), None)
    )
    return PropertyNames(tuple(dict.fromkeys(literals)), pattern)
