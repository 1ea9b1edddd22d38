"""Tests of the n-gram lookup, which drafts the tokens that followed an earlier occurrence of a sequence's
end."""

from hypothesis import given
from hypothesis import strategies as st

from baton.rooms.steps.ngram_lookup import LEAST, NgramLookup

TOKENS = st.lists(st.integers(0, 3), max_size=60)
"""Tokens of only four kinds, so that most endings of a sequence occurred before."""


def _lookup(tokens: list[int], longest: int = 8) -> NgramLookup:
    lookup = NgramLookup(len(tokens), longest)
    lookup.enter(tokens)
    return lookup


def test_what_followed_the_end_before_is_drafted() -> None:
    assert _lookup([1, 2, 3, 4, 5, 9, 1, 2, 3]).draft(2) == [4, 5]
    assert _lookup([1, 2, 3, 4, 5]).draft(4) == [], "the end is new"
    assert _lookup([7, 5, 1, 8, 6, 1]).draft(4) == [], "one token that came before is no occurrence"


def test_the_longest_occurrence_is_followed_and_of_equals_the_last() -> None:
    assert _lookup([1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3]).draft(1) == [7]
    assert _lookup([1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3], longest=2).draft(1) == [8], "no more are compared"
    assert _lookup([2, 3, 7, 0, 2, 3, 8, 1, 2, 3]).draft(1) == [8]


def test_what_goes_round_is_drafted_as_far_as_is_asked() -> None:
    assert _lookup([1, 2, 3, 1, 2, 3]).draft(7) == [1, 2, 3, 1, 2, 3, 1]
    assert _lookup([5, 5, 5]).draft(3) == [5, 5, 5]


@given(TOKENS, st.integers(1, 9), st.integers(LEAST, 6))
def test_a_draft_goes_on_from_an_earlier_occurrence(tokens: list[int], most: int, longest: int) -> None:
    """Each drafted token follows an earlier occurrence of the end. Without an occurrence there is no
    draft."""
    drafted = _lookup(tokens, longest).draft(most)
    lengths = {place: _common(tokens, place, longest) for place in range(1, len(tokens))}
    most_common = max(lengths.values(), default=0)
    if not drafted:
        assert most_common < LEAST
        return
    assert len(drafted) == most
    known = [*tokens, *drafted]
    followed = [place for place in lengths if known[place : place + most] == drafted]
    assert any(lengths[place] >= LEAST for place in followed)


@given(st.lists(st.integers(0, 1_000), max_size=40), st.integers(1, 9))
def test_where_few_places_are_alike_it_is_the_longest(tokens: list[int], most: int) -> None:
    twice = [*tokens, *tokens]
    drafted = _lookup(twice).draft(most)
    if len(tokens) >= LEAST:
        (longest, place) = max((_common(twice, place, 8), place) for place in range(1, len(twice)))
        assert longest >= LEAST
        known = [*twice, *drafted]
        assert drafted == known[place : place + most]


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_it_is_the_same_however_the_tokens_came(first: list[int], then: list[int], most: int) -> None:
    """Ranks that read a prompt in other pieces draft the same tokens."""
    pieces = NgramLookup(9)
    pieces.enter(first)
    for token in then:
        pieces.enter([token])
    whole = NgramLookup(9)
    whole.enter([*first, *then])
    assert len(pieces) == len(whole) == len(first) + len(then)
    assert pieces.draft(most) == whole.draft(most)


def _common(tokens: list[int], place: int, longest: int) -> int:
    length, end = 0, len(tokens)
    while length < min(place, longest) and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
