"""The allowed tokens depend on the output alone, and an answer ends only where it may."""

import json
import random
import re
from collections.abc import Callable
from typing import Any, cast

import pytest

from baton.grammars.grammar_state import BURST_S, FORCED_S, GrammarLost, GrammarState, Matcher
from baton.rooms.request import FinishReason, Grammar, Request
from tests.grammars.answers import (
    END,
    KINDS,
    NAMED,
    PADDING,
    drawn,
    fold_of,
    ids,
    lark,
    matcher_of,
    regex,
    request,
    schema,
    text_of,
    tokens_in,
    vocabulary,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ ]{0,2}"},
}
GRAMMARS = {
    "schema": schema(PERSON),
    "regex": regex(r"[0-9]{3}-[a-f]{2,5}"),
    "lark": lark('start: "yes" | "no" /[.!]{1,3}/'),
}


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_that_begins_anywhere_allows_what_one_allows_that_was_there_from_the_start(
    grammar: Grammar, kind: str
) -> None:
    """`mask-is-fold`: a room may continue behind any output, however its tokens were taken."""
    root, asked = fold_of(grammar, kind), request()
    for seed in range(12):
        grown, output = root.anew(), list[int]()
        masks = []
        for token in drawn(root.anew(), asked, seed):
            masks.append(grown.allowed(asked, output))
            output.append(token)
        for length in random.Random(seed).sample(range(len(output)), min(4, len(output))):
            later = root.anew()
            later.follow(output[: length // 2])
            assert later.allowed(asked, output[:length]) == masks[length]
            assert later.allowed(asked, output[:length]) == masks[length], "asked twice"


def test_an_output_that_was_cut_back_is_folded_anew() -> None:
    fold, asked = fold_of(GRAMMARS["schema"]), request()
    output = drawn(fold.anew(), asked, seed=1)
    first = fold.anew()
    masks = [first.allowed(asked, output[:length]) for length in (3, 9)]
    assert [first.allowed(asked, output[:length]) for length in (3, 9)] == masks


def test_an_output_that_no_mask_allowed_is_lost_and_says_nothing_of_what_it_was() -> None:
    fold = fold_of(regex("[0-9]+"))
    with pytest.raises(GrammarLost) as lost:
        fold.allowed(request(), ids("fox"))
    assert "fox" not in str(lost.value)


def test_a_grammar_whose_masks_cost_ever_more_is_lost_before_it_holds_everyone_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library's own bounds allow it. Each token adds ways to parse the output."""
    monkeypatch.setattr("baton.grammars.grammar_state.BURST_S", 0.02)
    monkeypatch.setattr("baton.grammars.grammar_state.MASK_S", 0.001)
    fold, asked = fold_of(lark('start: e\ne: e e | e e e | "a"')), request(ignore_eos=True)
    with pytest.raises(GrammarLost, match="too long at each token"):
        repeated(fold, asked, *ids("a"))


def repeated(fold: GrammarState, asked: Request, token: int) -> None:
    """Return an output of one token, repeated."""
    for count in range(500):
        fold.allowed(asked, [token] * count)


def test_a_fold_that_has_taken_something_is_nobodys_beginning() -> None:
    fold = fold_of(regex("[0-9]+"))
    fold.follow(ids("1"))
    with pytest.raises(ValueError, match="no beginning"):
        fold.anew()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_follow_the_grammar_whatever_is_drawn(kind: str) -> None:
    wants: dict[str, Callable[[str], object]] = {
        "schema": lambda text: json.loads(text)["age"] in range(151),
        "regex": lambda text: re.fullmatch(r"[0-9]{3}-[a-f]{2,5}", text),
        "lark": lambda text: re.fullmatch("yes|no[.!]{1,3}", text),
    }
    asked = request()
    for name, grammar in GRAMMARS.items():
        root = fold_of(grammar, kind)
        for seed in range(8):
            output = drawn(root.anew(), asked, seed)
            assert asked.finish_reason(output) is FinishReason.STOP
            assert wants[name](text_of(output, kind)), text_of(output, kind)


def test_tokens_that_the_tokenizer_lacks_and_special_ones_are_never_allowed() -> None:
    allowed = tokens_in(fold_of(regex(r"(.|\n)*")).allowed(request(), []))
    lacking = range(vocabulary().vocab_size - PADDING, vocabulary().vocab_size)
    assert not {*allowed} & {*lacking, 1, 2}
    assert END in allowed


def _allowed(fold: GrammarState, text: str, **more: Any) -> set[int]:
    return {*tokens_in(fold.anew().allowed(request(grammar=regex(""), **more), ids(text)))}


def test_an_end_may_come_where_the_grammar_may_end_and_nowhere_else() -> None:
    fold = fold_of(regex("[0-9]{2,3}"))
    ends = {"eos_token_ids": (END, 7)}  # a model has several, and the grammar's library knows of one
    assert not _allowed(fold, "1", **ends) & {END, 7}
    assert _allowed(fold, "12", **ends) >= {END, 7}
    assert _allowed(fold, "123", **ends) == {END, 7}


def test_an_end_of_sequence_token_that_is_text_too_ends_only_what_is_whole() -> None:
    (zero,) = ids("0")
    fold = fold_of(regex("[0-9]{2}"))
    assert zero not in _allowed(fold, "1", eos_token_ids=(END, zero))
    assert _allowed(fold, "12", eos_token_ids=(END, zero)) == {END, zero}


def test_fewer_tokens_than_wanted_put_an_end_off_but_bring_nothing_that_the_grammar_forbids() -> None:
    fold = fold_of(regex("[0-9]{2,3}"))
    assert END not in _allowed(fold, "12", min_tokens=3)
    assert _allowed(fold, "123", min_tokens=9) == {END}
    asked = request(grammar=regex(""), min_tokens=9)
    assert asked.finish_reason([*ids("123"), END]) is FinishReason.STOP


def test_an_end_that_is_ignored_is_put_off_until_nothing_else_is_left() -> None:
    fold = fold_of(regex("[0-9]{2,3}"))
    assert END not in _allowed(fold, "12", ignore_eos=True)
    assert _allowed(fold, "123", ignore_eos=True) == {END}
    asked = request(grammar=regex(""), ignore_eos=True)
    assert asked.finish_reason([*ids("123"), END]) is FinishReason.STOP


def test_a_callers_own_stop_token_comes_where_the_grammar_has_it_and_where_the_answer_is_whole() -> None:
    (two,) = ids("2")
    fold = fold_of(regex("[0-9]{2,3}"))
    assert two in _allowed(fold, "1", stop_token_ids=(two,))
    assert 1 not in _allowed(fold, "1", stop_token_ids=(1,)), "a special token is no text"
    assert 1 in _allowed(fold, "12", stop_token_ids=(1,))
    assert not _allowed(fold, "1", stop_token_ids=(two,), min_tokens=5) & {two}


def test_a_grammar_that_wants_the_end_of_sequence_as_text_ends_there() -> None:
    """Grammar and request contradict each other. The answer ends, and nothing fails."""
    fold = fold_of(lark('start: "a" <[0]> "b"'))
    assert _allowed(fold, "a") == {END}


@pytest.mark.parametrize("grammar", [NAMED, *GRAMMARS.values()], ids=["names", *GRAMMARS])
def test_what_is_forced_is_all_that_is_allowed_token_by_token_and_asking_changes_nothing(
    grammar: Grammar,
) -> None:
    """`mask-is-fold`: asking for forced tokens changes no mask."""
    asked, most = request(), 0
    for seed in range(12):
        output = drawn(fold_of(grammar), asked, seed)
        plain, asking = fold_of(grammar), fold_of(grammar)
        for length in range(len(output)):
            forced = asking.forced(output[:length], len(output))
            most = max(most, len(forced))
            assert output[length : length + len(forced)] == forced
            mask = asking.allowed(asked, output[:length])
            assert mask == plain.allowed(asked, output[:length])
            assert not forced or tokens_in(mask) == forced[:1]
    assert most > 3 or grammar is not NAMED


LONG = schema({"const": "the lazy dog and the quick fox " * 200})


def test_what_was_found_to_be_forced_is_looked_for_once() -> None:
    """The tokens are the same if few are returned at a time, and new ones come for another output."""
    asked = request()
    whole = fold_of(LONG).forced([], 10_000)
    assert len(whole) > 500
    fold, looks = counting(LONG)
    for length in range(len(whole)):
        assert fold.forced(whole[:length], 7) == whole[length : length + 7]
    assert looks == [1]
    output = drawn(fold_of(NAMED), asked, seed=1)
    cut_back = fold_of(NAMED)
    told = [cut_back.forced(output[:length], 16) for length in (9, 3, 9)]
    assert told[0] == told[2]
    assert told[1] == fold_of(NAMED).forced(output[:3], 16)


def test_looks_that_take_long_come_seldom_and_masks_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search takes the time of five tokens, so that the next one is for the sixth."""
    now = [0.0]
    monkeypatch.setattr("baton.grammars.grammar_state.time.thread_time", lambda: now[0])
    grammar, asked = regex("([0-9][a-f])*"), request()
    took = 5.5 * FORCED_S
    fold, looks = counting(grammar, lambda: now.__setitem__(0, now[0] + took))
    output = ids("1a2b3c4d5e6f")
    for length in range(12):
        assert fold.forced(output[:length], 16) == []
        fold.allowed(asked, output[:length])
    assert looks == [3], "behind 0, 5 and 10 tokens"
    took = 2 * BURST_S
    fold, looks = counting(grammar, lambda: now.__setitem__(0, now[0] + took))
    assert fold.forced([], 16) == []
    fold.allowed(asked, [])
    assert looks == [1]


def counting(grammar: Grammar, look: Callable[[], object] = lambda: None) -> tuple[GrammarState, list[int]]:
    """Return the state of a grammar, and the number of its searches for forced tokens."""
    looks, matcher = [0], matcher_of(grammar)

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(matcher, name)

        def compute_ff_tokens(self) -> list[int]:
            looks[0] += 1
            look()
            return matcher.compute_ff_tokens()

    return GrammarState(cast("Matcher", Counting())), looks


def test_a_copy_may_take_as_long_as_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def later() -> float:
        now[0] += 0.06
        return now[0]

    monkeypatch.setattr("baton.grammars.grammar_state.time.thread_time", later)
    fold, asked = fold_of(regex("[0-9]+")), request()
    fold.allowed(asked, [])
    with pytest.raises(GrammarLost, match="too long at each token"):
        fold.copy().allowed(asked, [])
