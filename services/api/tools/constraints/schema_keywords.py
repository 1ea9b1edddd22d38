"""Rewrite rules for keywords of a JSON schema that the grammar library (llguidance) does not support.

A keyword that constrains nothing is dropped. A keyword that others can express is rewritten. Any other
keyword stays, and the library refuses it by name. Each rule takes a schema whose subschemas have already been
rewritten.

No I/O, clock or threads.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from baton.api.tools.constraints.schema_shapes import COUNTS
from baton.grammars.json_schema import TYPES, is_anything, is_equal, type_of, types_in

Keywords = dict[str, Any]
Rule = Callable[[Keywords], Keywords | bool]

ANNOTATIONS: Final = frozenset(
    {"$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "$vocabulary"}
    | {"$dynamicAnchor", "$recursiveAnchor"}
)
"""Schema keywords that constrain no value, and are dropped. A reference to a dynamic anchor is still refused.
"""
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Values of the schema keyword `format` that constrain a string. Any other value is only an annotation."""
ABOUT: Final[Mapping[str, frozenset[str]]] = {
    "array": frozenset(
        {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"}
        | {"contains", "minContains", "maxContains", "unevaluatedItems"}
    ),
    "object": frozenset(
        {"properties", "patternProperties", "additionalProperties", "required", "minProperties"}
        | {"maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"}
        | {"unevaluatedProperties"}
    ),
    "string": frozenset({"pattern", "minLength", "maxLength", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
"""Schema keywords that constrain only values of one JSON type, by the name of that type."""
DESCRIPTIVE: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
    ),
    "array": frozenset({"items", "prefixItems"}),
}
"""Schema keywords that describe values of one type, by the name of that type. If the schema has one of them
and no `type`, the type is inferred."""
TYPED: Final = frozenset({"type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf", "not", "if"})
"""Schema keywords that already determine the values. If one is present, no missing `type` is inferred."""
IN_PLACE: Final = frozenset(
    {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "dependencies", "contains"}
)
"""Schema keywords that apply other schemas to the same value, or evaluate its items. If one is present,
`unevaluatedProperties` and `unevaluatedItems` are not rewritten."""
BOUND: Final = 2**63 - 1024
"""Largest absolute value of a numeric bound that the grammar library takes. A larger bound is narrowed to it.
"""
DEPENDENTS_MAX: Final = 4
"""Most properties with `dependentRequired` that are rewritten. Each doubles the number of alternatives."""


def without(schema: Keywords, *words: str) -> Keywords:
    """Return the schema without the keywords `words`."""
    return {word: value for word, value in schema.items() if word not in words}


def with_also(schema: Keywords, *others: Any) -> Keywords:
    """Return the schema with the schemas `others` added to its `allOf`, so that a value has to fit them as
    well."""
    return {**schema, "allOf": [*schema.get("allOf", ()), *others]} if others else schema


def with_inferred_type(schema: Keywords) -> Keywords:
    """Add a missing type to a schema: `object` if it describes properties, `array` if it describes items.

    The author of such a schema means this type. Without it, a model could answer with a number, for example.
    """
    words = schema.keys()
    if words & TYPED:
        return schema
    kinds = [kind for kind, strong in DESCRIPTIVE.items() if words & strong]
    return {"type": kinds[0], **schema} if len(kinds) == 1 else schema


def without_idle_types(schema: Keywords) -> Keywords:
    """Drop annotations from a schema, and keywords for values of types that the schema does not allow."""
    types = types_in(schema) | ({"number"} if "integer" in types_in(schema) else set())
    idle = ANNOTATIONS.union(*(words for kind, words in ABOUT.items() if kind not in types))
    return {
        word: int(value) if word in COUNTS else value for word, value in schema.items() if word not in idle
    }


def without_empty_lists(schema: Keywords) -> Keywords:
    """Drop `allOf`, `patternProperties` and `dependentSchemas` from a schema if they are empty."""
    empty = (
        word for word in ("allOf", "patternProperties", "dependentSchemas") if not schema.get(word, True)
    )
    return without(schema, *empty)


def with_known_format(schema: Keywords) -> Keywords:
    """Drop a `format` that is only an annotation. Rewrite the format of a UUID version as a pattern."""
    form = schema.get("format")
    if form is None or form in FORMATS:
        return schema
    rest = without(schema, "format")
    if form[:4] == "uuid" and form[4:] in ("1", "3", "4", "5", "6", "7", "8"):
        digits = "-".join(("[0-9a-f]{8}", "[0-9a-f]{4}", f"{form[4]}[0-9a-f]{{3}}", "[89ab][0-9a-f]{3}"))
        return with_also(rest, {"pattern": f"^{digits}-[0-9a-f]{{12}}$"})
    return rest


def with_bounds(schema: Keywords) -> Keywords:
    """Narrow the numeric bounds of a schema to the range that the grammar library takes (64-bit numbers)."""
    made: Keywords = dict(schema)
    for word in ("minimum", "exclusiveMinimum"):
        made |= {word: -BOUND} if _number(made.get(word)) < -BOUND else {}
    for word in ("maximum", "exclusiveMaximum"):
        made |= {word: BOUND} if _number(made.get(word)) > BOUND else {}
    return made


def _number(value: Any) -> float:
    """Return a number unchanged, and 0 for any other value. Draft 4 has bounds that are no numbers, such as
    `exclusiveMinimum: true`."""
    return value if isinstance(value, int | float) else 0


def without_idle_contains(schema: Keywords) -> Keywords | bool:
    """Drop a `contains` that constrains nothing, or express it by `minItems` and `maxItems`.

    `minContains` and `maxContains` are dropped if there is no `contains`.
    """
    if "contains" not in schema:
        return without(schema, "minContains", "maxContains")
    wanted, most = schema["contains"], schema.get("maxContains")
    least: int = schema.get("minContains", 1)
    rest = without(schema, "contains", "minContains", "maxContains")
    if is_anything(wanted) or (wanted == schema.get("items") and "prefixItems" not in schema):
        rest["minItems"] = max(least, rest.get("minItems", 0))
        if most is not None:
            rest["maxItems"] = min(most, rest.get("maxItems", most))
        return rest
    if wanted is False and least > 0:
        return _without_types(rest, frozenset({"array"})) or False
    return rest if (most is None or wanted is False) and not least else schema


def without_idle_items(schema: Keywords) -> Keywords:
    """Drop the schema keyword `uniqueItems` if it constrains nothing, and `additionalItems` if `items` is not
    a list."""
    made = schema
    most: int = schema.get("maxItems", 2)
    if most < 2 or not schema.get("uniqueItems", True):
        made = without(made, "uniqueItems")
    return made if isinstance(schema.get("items"), list) else without(made, "additionalItems")


def without_idle_counts(schema: Keywords) -> Keywords:
    """Drop `minProperties` and `maxProperties` if the other keywords of the schema imply them."""
    idle = []
    if schema.get("minProperties", 0) <= len(set(schema.get("required", ()))):
        idle.append("minProperties")
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        possible = [name for name, each in schema.get("properties", {}).items() if each is not False]
        if schema.get("maxProperties", 0) >= len(possible):
            idle.append("maxProperties")
    return without(schema, *idle)


def without_condition(schema: Keywords) -> Keywords | bool:
    """Drop an `if` without a consequence, and `then` and `else` without an `if`. Resolve a constant `if`."""
    rest = without(schema, "if", "then", "else")
    if "if" not in schema:
        return rest
    condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
    if is_anything(then) and is_anything(otherwise):
        return rest
    if is_anything(condition) or condition is False:
        holds = otherwise if condition is False else then
        return False if holds is False else with_also(rest, *(() if is_anything(holds) else (holds,)))
    return schema


def without_negation(schema: Keywords) -> Keywords | bool:
    """Replace the schema keyword `not` by the types, enum values or property names that it leaves. If that is
    impossible, the keyword stays."""
    if "not" not in schema:
        return schema
    negated, rest = schema["not"], without(schema, "not")
    if negated is False:
        return rest
    if is_anything(negated):
        return False
    made = _negated(rest, negated)
    return schema if made is None else made


def _negated(rest: Keywords, negated: Mapping[str, Any]) -> Keywords | bool | None:
    """Return the schema `rest` without the values that `negated` allows, or None if this is impossible."""
    words = negated.keys()
    if words == {"not"}:
        return with_also(rest, negated["not"])
    if words == {"type"}:
        return _without_types(rest, types_in(negated))
    if words == {"required"} and rest.get("type") == "object" and len(negated["required"]) == 1:
        return {**rest, "properties": {**rest.get("properties", {}), negated["required"][0]: False}}
    if words <= {"const", "enum", "type"} and negated.get("type", rest.get("type")) == rest.get("type"):
        return _without_values(rest, negated.get("enum", [negated.get("const")]))
    return None


def _without_types(rest: Keywords, types: frozenset[str]) -> Keywords | bool | None:
    own = _types(rest)
    if "integer" in types and "number" not in types and "number" in own:
        return None  # "number but not integer" cannot be written
    gone = types | ({"integer"} if "number" in types else frozenset())
    left = [each for each in own if each not in gone]
    return {**rest, "type": left} if left else False


def _without_values(rest: Keywords, values: Any) -> Keywords | bool | None:
    """Return the schema `rest` without these values. Return None if no keyword can express that, and False if
    no value is left."""
    if "enum" in rest:
        left = [each for each in rest["enum"] if not any(is_equal(each, value) for value in values)]
        return {**rest, "enum": left} if left else False
    own = _types(rest)
    return rest if not any(type_of(value) in own for value in values) else None


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the JSON types that a schema allows, in the order of its `type`. A schema without
    `type` allows all."""
    given = schema.get("type", list(TYPES))
    return [given] if isinstance(given, str) else [*given]


def without_unevaluated(schema: Keywords) -> Keywords:
    """Replace `unevaluatedProperties` and `unevaluatedItems` by `additionalProperties` and `items`.

    This is done only if no other keyword of the schema evaluates the same properties or items.
    """
    made = schema
    for word, others in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if word not in made:
            continue
        if is_anything(made[word]) or others in made:
            made = without(made, word)
        elif not IN_PLACE & made.keys():
            made = {**without(made, word), others: made[word]}
    return made


def with_dependencies(schema: Keywords) -> Keywords:
    """Replace `dependentRequired` by alternatives (`anyOf`), and drop dependencies that constrain nothing."""
    made, wanted = schema, dict[str, Any]()
    if "dependencies" in made:
        given = made["dependencies"]
        lists = {name: each for name, each in given.items() if isinstance(each, list)}
        rest = {name: each for name, each in given.items() if name not in lists and not is_anything(each)}
        wanted |= lists
        made = {**without(made, "dependencies"), **({"dependencies": rest} if rest else {})}
    if "dependentSchemas" in made and all(map(is_anything, made["dependentSchemas"].values())):
        made = without(made, "dependentSchemas")
    wanted |= made.get("dependentRequired", {})
    wanted = {name: names for name, names in wanted.items() if names}
    if len(wanted) > DEPENDENTS_MAX:
        return made
    alternatives = (
        {"anyOf": [{"properties": {name: False}}, {"required": [*names]}]} for name, names in wanted.items()
    )
    return with_also(without(made, "dependentRequired"), *alternatives)


RULES: Final[tuple[Rule, ...]] = (
    without_idle_types,
    without_empty_lists,
    with_known_format,
    with_bounds,
    without_idle_contains,
    without_idle_items,
    without_condition,
    without_negation,
    without_unevaluated,
    with_dependencies,
    without_idle_counts,
)


def ruled(schema: Keywords) -> Keywords | bool:
    """Return a schema rewritten by all rules of this module.

    The result may be a bool: True is the schema that allows every value, False the one that allows none.
    """
    for rule in RULES:
        made = rule(schema)
        if isinstance(made, bool):
            return made
        schema = made
    return schema
