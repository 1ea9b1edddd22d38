"""A grammar that ends the checking process ends no other, and the next grammar is checked as before."""

from collections.abc import Iterator

import psutil
import pytest

from baton.grammars.grammar_check import TOO_COMPLEX, TOO_COSTLY, TOO_LONG, GrammarChecker
from baton.rooms.request import Grammar
from tests.api import tiny
from tests.grammars.answers import END, lark, regex, schema

CHAIN = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} | r{i + 1} "x"' for i in range(3000)) + '\nr3000: "y"'
"""Rules that overflow the library's stack."""
PATTERNS = [{"type": "string", "pattern": f".*[a-{chr(98 + i)}]{{{i}}}.*"} for i in range(20)]
"""Conjunctions that multiply with each other."""
REPEATED = regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}")
DIGITS = regex("[0-9]{2}")


@pytest.fixture(scope="module")
def judge() -> Iterator[GrammarChecker]:
    backend = tiny.byte_level().backend_tokenizer
    made = GrammarChecker(backend, backend.get_vocab_size(), (END,), limit_s=0.5)
    yield made
    made.close()


def test_good_grammars_are_passed_on_and_others_refused_by_name(judge: GrammarChecker) -> None:
    assert judge.check(DIGITS, False) == DIGITS
    assert judge.check(regex("(a"), False) == "unclosed group"
    assert (
        judge.check(schema({"type": "array", "uniqueItems": True}), False)
        == 'Unimplemented keys: ["uniqueItems"]'
    )
    converted = judge.check(lark('root ::= "yes" | "nö"'), True)
    assert isinstance(converted, Grammar)
    assert judge.check(converted, False) == converted


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (lark(CHAIN), TOO_COMPLEX),
        (schema({"allOf": PATTERNS}), TOO_LONG),
        (REPEATED, f"{TOO_COSTLY}: lexer error: too many expressions constructed"),
    ],
    ids=["it overflows the stack", "it takes for ever", "an answer explodes as it grows"],
)
def test_what_it_does_not_survive_is_refused_and_the_next_is_judged(
    judge: GrammarChecker, grammar: Grammar, why: str
) -> None:
    assert judge.check(grammar, False) == why
    assert judge.check(DIGITS, False) == DIGITS


def test_one_that_died_for_no_grammar_of_its_own_is_followed_by_another() -> None:
    backend, others = tiny.byte_level().backend_tokenizer, psutil.Process().children()
    judge = GrammarChecker(backend, backend.get_vocab_size(), (END,))
    try:
        assert judge.check(DIGITS, False) == DIGITS
        [process] = [each for each in psutil.Process().children() if each not in others]
        process.kill()
        process.wait()
        assert judge.check(DIGITS, False) == DIGITS
    finally:
        judge.close()


def test_a_model_that_holds_nothing_says_so() -> None:
    backend = tiny.byte_level().backend_tokenizer
    made = GrammarChecker(backend, backend.get_vocab_size(), ())
    try:
        assert "no token that ends a text" in str(made.check(DIGITS, False))
    finally:
        made.close()
