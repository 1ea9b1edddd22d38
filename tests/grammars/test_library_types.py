"""Schemas of zod and pydantic are applied, but for those that are named here."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from baton.api.tools.constraints.schema_text import schema_text
from baton.grammars.grammar_check import check_grammar
from baton.grammars.grammar_state import GrammarState
from baton.rooms.request import Grammar, GrammarKind
from tests.grammars.answers import END, fold_of, ids, request, text_of, tokens_in, vocabulary
from tests.grammars.pydantic_types import PYDANTIC_TYPES

FIXTURE: Final = Path(__file__).with_name("zod_types.json")
"""Types of zod, made by `zod_types.mjs`."""
ZOD_TYPES: Final[Mapping[str, Any]] = json.loads(FIXTURE.read_text(encoding="utf-8"))
ZOD_REFUSED: Final[Mapping[str, str]] = dict.fromkeys(("duration", "emoji"), "look-around")
"""Reason of refusal, by type. Their patterns look ahead, which no automaton does."""
PYDANTIC_REFUSED: Final[Mapping[str, str]] = dict.fromkeys(("set", "frozenset"), "uniqueItems")
"""Reason of refusal, by type. No grammar compares an item with all before it."""
SCHEMA_SAYS_LESS: Final = frozenset(
    {"Decimal", "Decimal with places", "datetime", "datetime with a zone", "time", "timedelta", "UUID4"}
    | {"AnyUrl", "HttpUrl", "PostgresDsn", "IPvAnyAddress", "IPv4Network", "Json", "Base64Bytes", "ByteSize"}
    | {"Pattern", "Fraction", "str as an e-mail", "dict by int", "dict by a pattern", "Path", "IPv6Address"}
)
"""Types of pydantic that refuse some of what their own schemas allow: an hour of 60 minutes, a free text."""
CLOSERS: Final = tuple(ids(each)[0] for each in ('"', "}", "]"))
TOKENS: Final = 400
SEEDS: Final = 8
COMPACT: Final = {"whitespace_flexible": False}


def grammar_of(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text("schema", schema, COMPACT))


def answer_drawn(root: GrammarState, seed: int) -> Any:
    """Return a random answer, or None if it does not end soon."""
    draw, fold, asked, output = random.Random(seed), root.anew(), request(), list[int]()
    while len(output) < TOKENS:
        allowed = tokens_in(fold.allowed(asked, output))
        closing = [token for token in (*CLOSERS, END) if token in allowed]
        output.append(draw.choice(closing if closing and draw.random() < 0.5 else allowed))
        if output[-1] == END:
            return json.loads(text_of(output))
    return None


def check_answers(schema: Any, example: Any) -> list[Any]:
    """Check that the example is allowed, and that drawn answers validate. Returns an answer."""
    grammar = grammar_of(schema)
    assert check_grammar(grammar, False, vocabulary()) == grammar
    root = fold_of(grammar)
    output = ids(json.dumps(example, ensure_ascii=False, separators=(",", ":")))
    assert END in tokens_in(root.anew().allowed(request(), output))
    judge = Draft202012Validator(schema)
    drawn = [answer for seed in range(SEEDS) if (answer := answer_drawn(root, seed)) is not None]
    for answer in drawn:
        judge.validate(answer)
    return drawn


@pytest.mark.parametrize("name", [name for name in ZOD_TYPES if name not in ZOD_REFUSED])
def test_a_type_of_zod_is_applied(name: str) -> None:
    check_answers(**ZOD_TYPES[name])


@pytest.mark.parametrize(("name", "why"), ZOD_REFUSED.items())
def test_a_type_of_zod_that_no_grammar_says_is_refused_by_its_reason(name: str, why: str) -> None:
    assert why in str(check_grammar(grammar_of(ZOD_TYPES[name]["schema"]), False, vocabulary()))


@pytest.mark.parametrize("name", [name for name in PYDANTIC_TYPES if name not in PYDANTIC_REFUSED])
def test_a_type_of_pydantic_is_applied(name: str) -> None:
    kind, example = PYDANTIC_TYPES[name]
    adapter = TypeAdapter[Any](kind)
    value = adapter.validate_json(json.dumps(example))
    check_answers(
        adapter.json_schema(mode="serialization"), adapter.dump_python(value, mode="json", by_alias=True)
    )
    drawn = check_answers(adapter.json_schema(), example)
    for answer in drawn if name not in SCHEMA_SAYS_LESS else ():
        adapter.validate_json(json.dumps(answer))


@pytest.mark.parametrize(("name", "why"), PYDANTIC_REFUSED.items())
def test_a_type_of_pydantic_that_no_grammar_says_is_refused_by_its_reason(name: str, why: str) -> None:
    schema = TypeAdapter[Any](PYDANTIC_TYPES[name][0]).json_schema()
    assert why in str(check_grammar(grammar_of(schema), False, vocabulary()))


def test_few_types_are_refused() -> None:
    assert len(ZOD_TYPES) >= 27
    assert len(ZOD_REFUSED) <= 2
    assert len(PYDANTIC_TYPES) >= 55
    assert len(PYDANTIC_REFUSED) <= 4
