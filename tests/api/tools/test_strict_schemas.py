"""Objects have no unnamed properties, unless several parts of a schema describe one object."""

import json
from collections.abc import Callable
from typing import Any, Final

import httpx
import pytest

from baton.api.tools.constraints.strict_schemas import without_unnamed_properties
from tests.api.requests.test_bad_input import CHAT, chat
from tests.api.scripted import ScriptedBackend

A: Final[dict[str, Any]] = {"properties": {"a": {"type": "integer"}}}
SHUT: Final = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, SHUT),
        ({"type": "array", "items": A}, {"type": "array", "items": SHUT}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, {"$defs": {"A": SHUT}, "$ref": "#/$defs/A"}),
        ({"properties": {"x": A}}, {"properties": {"x": SHUT}, "additionalProperties": False}),
        (
            {"properties": {"properties": A}},
            {"properties": {"properties": SHUT}, "additionalProperties": False},
        ),
        ({"const": A}, {"const": A}),
        ({"enum": [A]}, {"enum": [A]}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_not_named_does_not_come(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert without_unnamed_properties(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "required": ["b"]},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {**A, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"$defs": {"A": A}, "properties": {"b": {}}, "$ref": "#/$defs/A"},
        {"type": "object"},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_asks_for_others_stays_open(schema: dict[str, Any]) -> None:
    assert without_unnamed_properties(schema) == schema


FORMS: Final[dict[str, Callable[[Any], Any]]] = {
    "response_format": lambda it: {"type": "json_schema", "json_schema": {"name": "x", "schema": it}},
    "structured_outputs": lambda it: {"json": it},
    "guided_json": lambda it: it,
    "json_schema": json.dumps,
}


@pytest.mark.parametrize("field", FORMS)
async def test_every_field_that_takes_a_schema_means_the_same(
    http: httpx.AsyncClient, backend: ScriptedBackend, field: str
) -> None:
    assert (await http.post(CHAT, json=chat(**{field: FORMS[field](A)}))).status_code == 200
    grammar = backend.asked[0].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["additionalProperties"] is False
