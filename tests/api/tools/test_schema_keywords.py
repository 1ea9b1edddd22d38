"""Keywords of JSON Schema that constrain nothing refuse no request, and the others keep their meaning."""

import json
from typing import Any, Final
from urllib.parse import quote

import httpx
import pytest
from jsonschema import Draft202012Validator

from baton.api.backend import Limits
from baton.api.tools.constraints.schema_normalization import normalized, without_nulls
from baton.api.tools.constraints.schema_shapes import SchemaRefused
from baton.api.tools.constraints.strict_schemas import without_unnamed_properties
from baton.rooms.request import FinishReason
from tests.api.requests.test_bad_input import CHAT, chat, check
from tests.api.scripted import ScriptedBackend
from tests.grammars.answers import drawn, fold_of, request, schema, text_of

SEEDS: Final = 6
SHORT: Final[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": 99}
A: Final[dict[str, Any]] = {"type": "object", "properties": {"a": SHORT}, "additionalProperties": False}
DIGITS: Final[dict[str, Any]] = {"type": "array", "items": SHORT, "maxItems": 3}


def names(wanted: Any, **more: Any) -> dict[str, Any]:
    given = {"propertyNames": wanted, "maxProperties": 3, "additionalProperties": SHORT}
    return {"type": "object", **given, **more}


def rewritten(given: Any) -> dict[str, Any]:
    return normalized(without_unnamed_properties(without_nulls(given)))


IDLE: Final[dict[str, tuple[Any, Any]]] = {
    "names that are texts": ({"propertyNames": {"type": "string"}}, {"type": "object"}),
    "names by a reference to texts": (
        {"$defs": {"k": {"type": "string", "title": "K"}}, "propertyNames": {"$ref": "#/$defs/k"}},
        {"type": "object", "$defs": {"k": {"type": "string"}}},
    ),
    "names of any length": ({"propertyNames": {"minLength": 0}}, {"type": "object"}),
    "names with an unknown format": ({"propertyNames": {"format": "slug"}}, {"type": "object"}),
    "names of no object": ({"type": "string", "propertyNames": {"enum": ["a"]}}, {"type": "string"}),
    "uniqueItems false": ({"type": "array", "uniqueItems": False}, {"type": "array"}),
    "uniqueItems of no list": ({"type": "string", "uniqueItems": True}, {"type": "string"}),
    "uniqueItems of one": (
        {"type": "array", "maxItems": 1, "uniqueItems": True},
        {"type": "array", "maxItems": 1},
    ),
    "minContains alone": ({"minContains": 2, "maxContains": 3}, {}),
    "contains, none at least": ({"contains": {"type": "null"}, "minContains": 0}, {}),
    "contains anything": ({"type": "array", "contains": {}}, {"type": "array", "minItems": 1}),
    "contains what all items are": (
        {"type": "array", "items": SHORT, "contains": SHORT, "maxContains": 4},
        {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 4},
    ),
    "if alone": ({"if": {"type": "string"}}, {}),
    "then and else alone": ({"then": False, "else": {"type": "string"}}, {}),
    "if with idle consequences": ({"if": {"type": "string"}, "then": {}, "else": True}, {}),
    "if anything": ({"if": {}, "then": A}, {"allOf": [A]}),
    "if nothing": ({"if": False, "then": A}, {}),
    "not nothing": ({"type": "string", "not": False}, {"type": "string"}),
    "not not": ({"not": {"not": A}}, {"allOf": [A]}),
    "a property that is not": (
        {"properties": {"a": {"not": {}}}},
        {"type": "object", "properties": {"a": False}, "additionalProperties": False},
    ),
    "not a type": ({"type": ["string", "null"], "not": {"type": "null"}}, {"type": ["string"]}),
    "not another type": ({"type": "string", "not": {"const": 3}}, {"type": "string"}),
    "not some of its values": ({"enum": [1, True, "x"], "not": {"enum": [True, "y"]}}, {"enum": [1, "x"]}),
    "not a name": (
        {"type": "object", "not": {"required": ["a"]}},
        {"type": "object", "properties": {"a": False}},
    ),
    "dependencies of nothing": (
        {"dependentRequired": {"a": []}, "dependentSchemas": {"b": {}}, "dependencies": {"c": True}},
        {},
    ),
    "unevaluated anything": ({"unevaluatedProperties": True, "unevaluatedItems": {}}, {}),
    "unevaluated where nothing else looks": (
        {"type": "object", "properties": {"a": SHORT}, "unevaluatedProperties": False},
        {"type": "object", "properties": {"a": SHORT}, "additionalProperties": False},
    ),
    "additionalItems without a list": (
        {"type": "array", "items": SHORT, "additionalItems": False},
        {"type": "array", "items": SHORT},
    ),
    "an unknown format": ({"type": "string", "format": "starts_with"}, {"type": "string"}),
    "a pattern beside it": (
        {"type": "string", "format": "includes", "pattern": "x"},
        {"type": "string", "pattern": "x"},
    ),
    "a format of numbers": ({"format": "int64"}, {}),
    "annotations": (
        {"$comment": "", "title": "", "description": "", "readOnly": True, "writeOnly": False}
        | {"deprecated": True, "examples": [1], "default": None, "contentEncoding": "base64"}
        | {"contentMediaType": "text/html", "contentSchema": {"type": "strin"}, "$vocabulary": {}},
        {},
    ),
    "a dynamic anchor": ({"$dynamicAnchor": "a", "$recursiveAnchor": True, "type": "null"}, {"type": "null"}),
    "an unknown dialect": ({"$schema": "https://example.com/mine", "type": "null"}, {"type": "null"}),
    "a name that is no address": ({"$id": "not a {uri}", "type": "null"}, {"type": "null"}),
    "null for what is absent": (
        {"required": None, "properties": None, "items": None, "format": None, "enum": None},
        {},
    ),
    "null that is a value": ({"const": None}, {"const": None}),
    "numbers of other languages": ({"type": "string", "maxLength": 3.0}, {"type": "string", "maxLength": 3}),
    "bounds beyond all numbers": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        {"type": "number", "minimum": -(2**63 - 1024), "maximum": 2**63 - 1024},
    ),
    "words that are names": (
        {"properties": {"propertyNames": True, "if": True, "title": {"title": "x"}}},
        {
            "type": "object",
            "properties": {"propertyNames": True, "if": True, "title": {}},
            "additionalProperties": False,
        },
    ),
    "words that are values": (
        {"const": {"title": "x", "uniqueItems": False, "not": {}}},
        {"const": {"title": "x", "uniqueItems": False, "not": {}}},
    ),
    "properties without a type": (
        {"properties": {"a": {"items": SHORT}}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": SHORT}},
            "required": ["a"],
            "additionalProperties": False,
        },
    ),
    "no type beside one": (
        {"type": ["object", "null"], "allOf": [{"required": ["a"]}]},
        {"type": ["object", "null"], "allOf": [{"required": ["a"]}]},
    ),
    "no type of values or alternatives": (
        {"anyOf": [{"required": ["a"]}, {"const": 1, "properties": {}}]},
        {
            "anyOf": [
                {"type": "object", "required": ["a"]},
                {"const": 1, "properties": {}, "additionalProperties": False},
            ]
        },
    ),
    "a target that does not stay": (
        {
            "properties": {
                "a": {"propertyNames": {"maxLength": 3}},
                "b": {"$ref": "#/properties/a/propertyNames"},
            }
        },
        {
            "properties": {
                "a": {
                    "type": "object",
                    "patternProperties": {"^(?s:.){0,3}$": True},
                    "additionalProperties": False,
                },
                "b": {"$ref": "#/$defs/schema_0"},
            },
            "type": "object",
            "additionalProperties": False,
            "$defs": {"schema_0": {"maxLength": 3}},
        },
    ),
}


@pytest.mark.parametrize(("given", "made"), IDLE.values(), ids=IDLE.keys())
def test_keywords_that_constrain_nothing_are_dropped_or_rewritten(given: Any, made: Any) -> None:
    assert rewritten(given) == made
    fold_of(schema(made))


MEANT: Final[dict[str, dict[str, Any]]] = {
    "names of a list": names({"type": "string", "enum": ["a", 'b "c"', "größe"]}),
    "names of a list, some described": names(
        {"enum": ["a", "b"]}, properties={"b": {"const": "x"}, "c": SHORT}, required=["a", "b"]
    ),
    "names of several lists": names({"anyOf": [{"const": "a"}, {"enum": ["b", "c"]}]}),
    "names of a list in another": names({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}),
    "names by a reference": names({"$ref": "#/$defs/k"}, **{"$defs": {"k": {"enum": ["a", "b"]}}}),
    "names by a pattern": names({"type": "string", "pattern": "^k[0-9]$"}, minProperties=1),
    "names by patterns": names(
        {"anyOf": [{"pattern": "^k[0-9]$"}, {"pattern": "^(ll|m)$"}]}, minProperties=1
    ),
    "names by a pattern, some described": names(
        {"pattern": "^k[0-9]$"}, properties={"k1": {"const": "x"}}, additionalProperties={}, required=["k1"]
    ),
    "names of a length": names({"minLength": 2, "maxLength": 3}, minProperties=1),
    "names that are dates": names({"format": "date"}, minProperties=1),
    "names that are identifiers": names({"format": "uuid"}, minProperties=1),
    "names that cannot be": names({"type": "integer"}),
    "names of a list with a large value": names({"enum": ["a", "b"]}, additionalProperties=A),
    "dependent names": {**A, "properties": {"a": SHORT, "b": SHORT}, "dependentRequired": {"a": ["b"]}},
    "dependencies": {**A, "properties": {"a": SHORT, "b": SHORT}, "dependencies": {"a": ["b"]}},
    "contains nothing": {**DIGITS, "type": ["array", "null"], "contains": False},
    "unevaluated items": {"prefixItems": [SHORT], "type": "array", "unevaluatedItems": False},
    "a version of identifiers": {"type": "string", "format": "uuid4"},
    "a known format beside a pattern": {"type": "string", "format": "date", "pattern": "^2020"},
    "not a value of its list": {"type": "string", "enum": ["a", "b"], "not": {"const": "a"}},
}


@pytest.mark.parametrize("given", MEANT.values(), ids=MEANT.keys())
def test_rewritten_keywords_mean_the_same(given: Any) -> None:
    """Draw each token among all allowed ones, and validate by the schema as it was given."""
    root = fold_of(schema({**rewritten(given), "x-guidance": {"whitespace_flexible": False}}))
    judge = Draft202012Validator(given, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for seed in range(SEEDS):
        asked = request()
        output = drawn(root.anew(), asked, seed, 1500)
        assert asked.finish_reason(output) is FinishReason.STOP
        judge.validate(json.loads(text_of(output)))


def test_a_new_definition_takes_the_name_of_no_other() -> None:
    """Two properties are referred to, and the first free name of each is one of the request's own."""
    given = {
        "$defs": {"schema_0": {"type": "null"}, "schema_2": {"type": "null"}},
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "boolean"},
            "c": {"$ref": "#/properties/a"},
            "d": {"$ref": "#/properties/b"},
        },
    }
    made, judge = rewritten(given), Draft202012Validator
    for value, fits in (({"c": 1, "d": True}, True), ({"c": True}, False), ({"d": 1}, False)):
        assert judge(made).is_valid(value) == judge(given).is_valid(value) == fits


@pytest.mark.parametrize(
    "name", ["a b", "Page<User>", "Page«User»", "Größe", 'q"', "a[0]{|}^`\\", "a#b", "a%b", "~/"]
)
@pytest.mark.parametrize("is_encoded", [True, False])
def test_a_definition_may_have_any_name(name: str, is_encoded: bool) -> None:
    """Generators write generic types into references, encoded as a URI or as they are."""
    token = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    reference = f"#/$defs/{quote(token, safe='%') if is_encoded else token}"
    given = {"$defs": {name: {"enum": ["x", 7]}}, "$ref": reference}
    root = fold_of(schema({**rewritten(given), "x-guidance": {"whitespace_flexible": False}}))
    assert {text_of(drawn(root.anew(), request(), seed)) for seed in range(SEEDS)} <= {'"x"', "7"}


REFUSED: Final[dict[str, tuple[Any, str]]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "if": ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    "contains": ({"type": "array", "contains": {"type": "null"}}, "contains"),
    "not": ({"type": "string", "not": {"pattern": "a"}}, "not"),
    "not one of many": ({"type": "string", "not": {"const": "a"}}, "not"),
    "nothing": ({"not": {}}, "no value fits it"),
    "names that are not": (names({"not": {"const": "a"}}), "'propertyNames' with 'not'"),
    "names by two patterns": (
        names({"pattern": "a", "minLength": 3}),
        "'propertyNames' with several patterns",
    ),
    "names beside patterns": (
        names({"enum": ["a"]}, patternProperties={"^b": {}}),
        "'propertyNames' beside 'patternProperties'",
    ),
    "names by a circle": (
        names({"$ref": "#/$defs/k"}, **{"$defs": {"k": {"anyOf": [{"$ref": "#/$defs/k"}, {"const": "a"}]}}}),
        "'propertyNames' follows more than",
    ),
    "a list that is none": ({"required": "a"}, "'required' has to be a list of texts"),
    "a schema that is none": ({"properties": {"a": "x"}}, "'properties' has to be an object of schemas"),
    "a count that is none": ({"maxLength": "3"}, "'maxLength' has to be a whole number"),
    "a count that is broken": ({"maxLength": 3.5}, "'maxLength' has to be a whole number"),
    "a type that is none": ({"properties": {"a": {"type": "STRING"}}}, "'type' has to be one of null,"),
    "no type of several": ({"type": []}, "'type' has to be one of null,"),
    "names that are no schema": ({"propertyNames": "x"}, "'propertyNames' has to be a schema"),
}


@pytest.mark.parametrize(("given", "why"), REFUSED.values(), ids=REFUSED.keys())
async def test_keywords_that_cannot_be_rewritten_are_refused_by_name(
    http: httpx.AsyncClient, given: Any, why: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}
    reply = await http.post(CHAT, json=chat(response_format=form))
    assert why in check(reply, 400, "response_format.json_schema.schema")


async def test_arguments_of_tools_are_read_by_the_same_rules(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    """Records are written so by zod, and by each client that describes its tools with zod."""
    record = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "string"},
    }
    parameters = {"type": "object", "properties": {"env": record}, "required": ["env"]}
    tool = {"type": "function", "function": {"name": "run", "parameters": parameters}}
    backend.known_limits = Limits(4096, prompt_tokens=4096, sequence_tokens=4096)
    reply = await http.post(CHAT, json=chat(tools=[tool], tool_choice="required"))
    assert reply.status_code == 200, reply.text
    assert backend.asked[0].grammar is not None
    assert "propertyNames" not in backend.asked[0].grammar.text


def test_what_many_names_share_is_written_once() -> None:
    large = {"type": "object", "properties": {f"p{place}": SHORT for place in range(100)}}
    many = [f"n{place}" for place in range(500)]
    made = rewritten({"propertyNames": {"enum": many}, "additionalProperties": large})
    assert len(json.dumps(made)) < 40_000


def test_a_pattern_is_never_tried_by_a_search_without_a_bound() -> None:
    with pytest.raises(SchemaRefused, match="several"):
        rewritten(names({"pattern": "^(a+)+$", "enum": ["a" * 40 + "b"]}))
