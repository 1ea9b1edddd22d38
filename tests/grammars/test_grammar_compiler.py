"""Grammars that no answer can follow are refused by their fault, and all costs are bounded."""

import json
from contextlib import suppress
from typing import Any

import pytest

from baton.grammars.grammar_compiler import GrammarRefused, compile_grammar
from baton.grammars.grammar_state import GrammarLost
from baton.grammars.vocabulary import vocabulary_of
from baton.rooms.request import GRAMMAR_BYTES_MAX, Grammar, GrammarKind
from baton.runtime.errors import StartupError
from tests.api import tiny
from tests.grammars.answers import drawn, fold_of, lark, regex, request, schema, vocabulary

SCHEMAS: dict[str, tuple[Any, str]] = {
    "no such type": ({"type": "strin"}, "strin"),
    "if": ({"type": "object", "if": {}, "then": {}}, "if"),
    "not": ({"not": {"type": "string"}}, "not"),
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"type": "string"}}, "contains"),
    "several may hold": (
        {"oneOf": [{"type": "object", "properties": {each: {"type": "string"}}} for each in "xy"]},
        "oneOf",
    ),
    "unknown format": ({"type": "string", "format": "hostname2"}, "format"),
    "nothing holds": ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
    "elsewhere": ({"$ref": "http://example.com/schema"}, "example.com"),
    "nowhere": ({"$ref": "#/$defs/missing"}, "missing"),
    "deep": (None, "recursion"),
}


@pytest.mark.parametrize(("value", "named"), SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_schema_that_no_answer_fits_is_refused_by_its_fault(value: Any, named: str) -> None:
    if value is None:
        value = {"type": "object"}
        for _ in range(200):
            value = {"type": "object", "properties": {"a": value}}
    with pytest.raises(GrammarRefused, match=named.replace("$", r"\$")):
        fold_of(schema(value))


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (regex("(a|b"), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (regex(r"[^\s\S]"), "no answer"),
        (lark('start: "a" | other'), "other"),
        (lark('start: "a'), "lexer error"),
        (lark("start: " + "(" * 20_000), "nested"),
        (regex("(" * 20_000), "unclosed group"),
    ],
)
def test_a_text_that_is_no_grammar_is_refused(grammar: Grammar, named: str) -> None:
    with pytest.raises(GrammarRefused, match=named) as refused:
        fold_of(grammar)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) <= 300


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(GrammarRefused):
        fold_of(Grammar(GrammarKind.JSON_SCHEMA, "{"))


BOMBS: dict[str, Grammar] = {
    "repeated repetitions": regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    "far back": regex("(a|b)*a(a|b){2000}"),
    "any of many": regex("(.*a){300}"),
    "ambiguous": lark('start: x\nx: x x | "a" | "a" x | x "a" |'),
    "twice at each level": schema(
        {
            "$defs": {
                f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
                for i in range(60)
            }
            | {"d60": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        }
    ),
    "all of any of": schema(
        {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"p{i}{k}": {}}} for k in range(8)]}
                for i in range(8)
            ]
        }
    ),
    "itself": schema({"$ref": "#"}),
    "itself in any of": schema({"anyOf": [{"$ref": "#"}, {"type": "string"}]}),
    "a long text of names": schema(
        {
            "type": "object",
            "properties": {f"name{i}": {"type": "string", "format": "date-time"} for i in range(1500)},
        }
    ),
    "large patterns": schema(
        {
            "type": "object",
            "properties": {str(i): {"type": "string", "pattern": f"^(a|b){{{i},900}}c$"} for i in range(900)},
        }
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("grammar", BOMBS.values(), ids=BOMBS.keys())
def test_what_explodes_is_refused_or_bounded(grammar: Grammar) -> None:
    """Without bounds these take minutes, or all memory."""
    assert len(grammar.text) <= GRAMMAR_BYTES_MAX
    try:
        fold = fold_of(grammar)
    except GrammarRefused:
        return
    with suppress(GrammarLost):
        assert drawn(fold.anew(), request(), seed=1, most=20)


def test_what_schemas_say_beside_what_holds_is_taken() -> None:
    """The example is a schema as pydantic and other generators write it."""
    said = {"title": "A", "description": "b", "default": {}, "examples": [], "deprecated": True}
    schema_of = "https://json-schema.org/draft/2020-12/schema"
    value = {"type": "object", "$schema": schema_of, "discriminator": {"propertyName": "kind"}, **said}
    assert json.loads(schema(value).text) == value
    fold_of(schema(value))


def test_a_model_without_an_end_holds_nothing() -> None:
    with pytest.raises(StartupError, match="no token that ends a text"):
        vocabulary_of(tiny.byte_level().backend_tokenizer, 500, ())


def test_the_models_vocabulary_may_be_smaller_than_its_tokenizers() -> None:
    backend = tiny.byte_level().backend_tokenizer
    smaller = vocabulary_of(backend, 300, (0,))
    assert smaller.vocab_size == backend.get_vocab_size() < vocabulary().vocab_size
    compile_grammar(regex("a+"), smaller)
