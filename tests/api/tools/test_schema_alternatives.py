"""A `oneOf` whose alternatives exclude each other is applied, also behind references. Others are refused."""

import json
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator

from baton.api.tools.constraints.schema_text import schema_text
from baton.grammars.grammar_check import check_grammar
from baton.rooms.request import Grammar, GrammarKind
from tests.grammars.answers import drawn, fold_of, request, text_of, vocabulary

SHORT: Final[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": 9}
A, B, C = ({"$ref": f"#/$defs/{name}"} for name in "ABC")


def kind(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": name, **more}, "required": ["kind", *more]}


def one_of(*options: Any, **definitions: Any) -> dict[str, Any]:
    return {"oneOf": [*options], "$defs": definitions}


DISJOINT: Final[dict[str, Any]] = {
    "a reference or null": one_of(A, {"type": "null"}, A=kind({"const": "a"})),
    "by a constant": one_of(A, B, A=kind({"const": "a"}), B=kind({"const": "b"}, x=SHORT)),
    "by lists": one_of(A, B, A=kind({"enum": ["a", 1]}), B=kind({"enum": ["b", True]})),
    "by a reference behind references": one_of(A, B, A=C, B=kind({"const": "b"}), C=kind({"const": "c"})),
    "by the type of a member": one_of(A, B, A=kind(SHORT), B=kind({"type": "boolean"})),
    "by a member that the other has not": one_of(
        {**kind({"const": 1}, x=SHORT), "additionalProperties": False},
        {**kind({"const": 1}, y=SHORT), "additionalProperties": False},
    ),
    "by a member within a member": one_of(A, B, A=kind(kind({"const": "a"})), B=kind(kind({"const": "b"}))),
    "by the type alone": one_of(A, B, A=SHORT, B={"type": ["boolean", "null"]}),
    "within a member": {"type": "object", "properties": {"p": {"oneOf": [A, {"type": "null"}]}}}
    | {"required": ["p"], "$defs": {"A": kind({"const": "a"})}},
}


def grammar_of(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text("schema", schema, {"whitespace_flexible": False}))


@pytest.mark.parametrize("given", DISJOINT.values(), ids=DISJOINT.keys())
def test_alternatives_that_exclude_each_other_are_applied(given: Any) -> None:
    root, finished = fold_of(grammar_of(given)), 0
    for seed in range(6):
        asked = request()
        output = drawn(root.anew(), asked, seed)
        if asked.finish_reason(output) is not None:
            Draft202012Validator(given).validate(json.loads(text_of(output)))
            finished += 1
    assert finished


OVERLAPPING: Final[dict[str, Any]] = {
    "an integer is a number": one_of(A, B, A={"type": "integer"}, B={"type": "number"}),
    "one is 1.0": one_of(A, B, A=kind({"const": 1}), B=kind({"const": 1.0})),
    "other members": one_of(
        A, B, A=kind({"type": "string"}), B={"type": "object", "properties": {"x": SHORT}}
    ),
    "a constant that need not be": one_of(
        A, B, A={"type": "object", "properties": {"k": {"const": 1}}}, B=kind({"const": 2})
    ),
    "lists": one_of(
        A, B, A={"type": "array", "items": SHORT}, B={"type": "array", "items": {"type": "null"}}
    ),
    "itself": one_of(A, {"$ref": "#"}, A={"type": "null"}),
    "elsewhere": one_of(A, {"type": "null"}, A={"$ref": "https://example.com/x"}),
}


@pytest.mark.parametrize("given", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_alternatives_of_which_two_may_hold_are_refused(given: Any) -> None:
    assert isinstance(check_grammar(grammar_of(given), False, vocabulary()), str)
