"""Grammars are compiled once, and few of them are cached."""

from collections import Counter

import pytest
from llguidance import LLTokenizer

from baton.grammars import grammar_cache
from baton.grammars.grammar_cache import GrammarCache
from baton.grammars.grammar_compiler import GrammarRefused, compile_grammar
from baton.grammars.grammar_state import GrammarLost, GrammarState
from baton.rooms.request import Grammar
from baton.runtime.errors import StartupError
from tests.grammars.answers import ids, regex, request, tokens_in, vocabulary


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how often each grammar was compiled."""
    times: Counter[str] = Counter()

    def count(grammar: Grammar, tokens: LLTokenizer) -> GrammarState:
        times[grammar.text] += 1
        return compile_grammar(grammar, tokens)

    monkeypatch.setattr(grammar_cache, "compile_grammar", count)
    return times


def test_a_grammar_is_compiled_once_for_all_its_outputs(counted: Counter[str]) -> None:
    kept = GrammarCache(vocabulary)
    [one], [other] = (kept.folds(regex("[0-9]{3}"), ids(text), 1).result() for text in ("1", "12"))
    assert counted == {"[0-9]{3}": 1}
    asked = request()
    assert one.allowed(asked, ids("12")) == other.allowed(asked, ids("12"))


def test_outputs_of_one_grammar_have_independent_states() -> None:
    kept = GrammarCache(vocabulary)
    [a], [b] = (kept.folds(regex("ax|by"), ids(text), 1).result() for text in "ab")
    allowed = [tokens_in(fold.allowed(request(), ids(text))) for fold, text in ((a, "a"), (b, "b"), (a, "a"))]
    assert allowed == [ids("x"), ids("y"), ids("x")]


def test_answers_behind_one_output_are_folded_each_by_itself_from_there_on() -> None:
    a, b, c = GrammarCache(vocabulary).folds(regex("c(xy|zw)"), ids("c"), 3).result()
    asked, outputs = request(), {a: "cx", b: "cz", c: "c"}
    allowed = [tokens_in(fold.allowed(asked, ids(text))) for fold, text in outputs.items()]
    assert allowed == [ids("y"), ids("w"), sorted(ids("xz"))]
    assert tokens_in(b.allowed(asked, [])) == ids("c"), "cut back behind what they share"


def test_a_grammar_that_is_refused_is_compiled_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    times = 0

    def refuse(grammar: Grammar, tokens: LLTokenizer) -> GrammarState:
        nonlocal times
        times += 1
        raise GrammarRefused("no such luck")

    monkeypatch.setattr(grammar_cache, "compile_grammar", refuse)
    with pytest.raises(GrammarRefused):
        GrammarCache(vocabulary).folds(regex("a"), [], 128).result()
    assert times == 1


def test_the_latest_used_grammars_are_cached(counted: Counter[str]) -> None:
    kept = GrammarCache(vocabulary, cached_max=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        kept.check(regex(text)).result()
    assert counted == {"a": 1, "b": 2, "c": 1}


def test_a_refusal_is_reported_and_not_cached() -> None:
    kept = GrammarCache(vocabulary)
    with pytest.raises(GrammarRefused, match="unclosed"):
        kept.check(regex("(")).result()
    with pytest.raises(GrammarLost):
        kept.folds(regex("[0-9]"), ids("fox"), 1).result()
    kept.check(regex("[0-9]")).result()


def test_a_vocabulary_is_read_before_anybody_is_served_and_once() -> None:
    """Reading the vocabulary stops all other threads."""
    reads: list[None] = []

    def read() -> LLTokenizer:
        reads.append(None)
        return vocabulary()

    kept = GrammarCache(read)
    kept.warm_up()
    assert len(reads) == 1
    kept.check(regex("[0-9]")).result()
    assert len(reads) == 1


def test_an_unreadable_vocabulary_fails_each_grammar() -> None:
    def read() -> LLTokenizer:
        raise StartupError("there is no tokenizer")

    kept = GrammarCache(read)
    kept.warm_up()
    with pytest.raises(StartupError, match="no tokenizer"):
        kept.check(regex("[0-9]")).result()
