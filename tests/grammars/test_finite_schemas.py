"""A schema that no finite answer fits is refused, and no other."""

from typing import Any, Final

import pytest

from baton.grammars.finite_schemas import has_finite_value
from baton.grammars.grammar_check import ENDLESS, check_grammar
from tests.grammars.answers import schema, vocabulary
from tests.grammars.test_schemas import random_schema

NODE: Final = {"$ref": "#/$defs/n"}


def defined(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"$defs": {"n": given, **more}, **NODE}


def objects(child: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"c": child}, "required": ["c"], **more}


ENDLESS_SCHEMAS: Final[dict[str, Any]] = {
    "itself": defined(objects(NODE)),
    "itself by the root": objects({"$ref": "#"}),
    "itself by another": defined(objects({"$ref": "#/$defs/m"}), m=objects(NODE)),
    "a list of itself": defined({"type": "array", "items": NODE, "minItems": 1}),
    "a list that begins with itself": defined({"type": "array", "prefixItems": [NODE], "minItems": 1}),
    "a longer list": defined({"type": "array", "prefixItems": [{}], "items": NODE, "minItems": 2}),
    "one of itself": defined({"anyOf": [objects(NODE), {"type": "array", "items": NODE, "minItems": 1}]}),
    "exactly one of itself": defined({"oneOf": [objects(NODE), NODE]}),
    "all of itself": defined({"allOf": [objects(NODE), {"type": "object"}]}),
    "itself alone": defined(NODE),
    "any value of itself": defined(
        {"type": "object", "additionalProperties": NODE, "minProperties": 1},
    ),
    "a required name of others": defined({"type": "object", "required": ["x"], "additionalProperties": NODE}),
    "what cannot be": objects({"type": "string", "enum": [1]}),
    "a place that nothing fits": objects(False),
    "of two kinds at once": {"type": "object", "allOf": [{"type": "string"}]},
    "deep within": {"type": "object", "properties": {"a": objects(NODE)}, "required": ["a"]}
    | {"$defs": {"n": objects(NODE)}},
}
FINITE_SCHEMAS: Final[dict[str, Any]] = {
    "itself, if wanted": defined({"type": "object", "properties": {"c": NODE}}),
    "itself or nothing": defined(objects({"anyOf": [NODE, {"type": "null"}]})),
    "itself or nothing by type": defined({**objects(NODE), "type": ["object", "null"]}),
    "a list of itself": defined(objects({"type": "array", "items": NODE})),
    "a list that may be shorter": defined({"type": "array", "prefixItems": [{}, NODE], "minItems": 1}),
    "one of several": defined({"anyOf": [objects(NODE), {"type": "string"}]}),
    "a constant": defined({"const": {"c": {}}, **objects(NODE)}),
    "no type": defined({"properties": {"c": NODE}, "required": ["c"]}),
    "any value of itself, or none": defined({"type": "object", "additionalProperties": NODE}),
    "by a pattern": defined({"type": "object", "required": ["x"], "patternProperties": {"^x": {}}}),
    "one optional name": {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    | {"minProperties": 1},
    "elsewhere": {"$ref": "https://example.com/x"},
    "a count as a float": {"type": "array", "minItems": 2.0, "prefixItems": [{}, {}, False]},
    "anything": {},
    "a tree of two": defined(
        objects({"$ref": "#/$defs/m"}), m={"anyOf": [NODE, {"type": "array", "items": NODE}]}
    ),
    "later ones first": {
        "$defs": {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(60)} | {"d60": {}},
        "$ref": "#/$defs/d0",
    },
}


@pytest.mark.parametrize("given", ENDLESS_SCHEMAS.values(), ids=ENDLESS_SCHEMAS.keys())
def test_what_no_finite_answer_fits_is_found(given: Any) -> None:
    assert not has_finite_value(given)
    assert check_grammar(schema(given), False, vocabulary()) == ENDLESS


@pytest.mark.parametrize("given", FINITE_SCHEMAS.values(), ids=FINITE_SCHEMAS.keys())
def test_what_an_answer_may_fit_is_not(given: Any) -> None:
    assert has_finite_value(given)


MALFORMED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "type": ({"type": 5}, "type must be a string or array of strings"),
    "a type in a list": ({"type": [["string"]]}, "type must be a string"),
    "an unknown type": ({"type": "text"}, "Invalid type: text"),
    "required": ({"type": "object", "required": None}, "Expected array for 'required', got null"),
    "a required name": (
        {"type": "object", "required": [["a"]]},
        "Expected string for 'required' item, got [\"a\"]",
    ),
    "properties": (
        {"type": "object", "properties": ["a"], "required": ["a"]},
        "properties must be an object",
    ),
    "minProperties": (
        {"type": "object", "minProperties": "3"},
        "Expected positive integer for 'minProperties', got \"3\"",
    ),
    "minItems": (
        {"type": "array", "minItems": 1.5, "prefixItems": [{}]},
        "Expected positive integer for 'minItems', got 1.5",
    ),
    "prefixItems": ({"type": "array", "prefixItems": {"a": {}}}, "prefixItems must be an array"),
    "enum": ({"enum": None}, "enum must be an array"),
    "anyOf": ({"anyOf": 5}, "anyOf must be an array"),
    "allOf": ({"allOf": 5}, "allOf must be an array"),
}
"""Schemas with a keyword whose value is of the wrong kind, and the refusal of each."""


@pytest.mark.parametrize(("given", "refusal"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_schema_is_refused_by_its_fault(given: dict[str, Any], refusal: str) -> None:
    nested = {"type": "object", "properties": {"c": {"$ref": "#/elsewhere/c"}}, "required": ["c"]}
    for malformed in (given, {**nested, "elsewhere": {"c": given}}):
        assert check_grammar(schema(malformed), False, vocabulary()) == refusal


@pytest.mark.parametrize("seed", range(200))
def test_no_schema_with_answers_is_taken_for_one_without(seed: int) -> None:
    assert has_finite_value(random_schema(seed))
