"""Tests of the ranks' ballots: the verdict is what all wish, and ranks with different rooms are found out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.rooms.ballot import HEADER, Ballot, read_verdict
from baton.rooms.errors import Reason, RostersDiverged
from baton.rooms.phases import Vote

PLACES = 5
INT64 = 2**63

votes = st.lists(st.sampled_from(Vote), min_size=PLACES, max_size=PLACES)
reasons = st.dictionaries(st.integers(0, PLACES - 1), st.sampled_from(Reason))
ballots = st.builds(
    Ballot,
    turn=st.just(3),
    digest=st.just(2**62 - 1),
    may_compute=st.booleans(),
    may_leave=st.booleans(),
    votes=votes,
    reasons=reasons,
    connects=st.integers(0, 3),
)


def agree(*ballots: Ballot) -> list[int]:
    return [min(words) for words in zip(*(each.encode() for each in ballots), strict=True)]


@given(st.lists(ballots, min_size=1, max_size=4))
def test_the_verdict_is_the_minimum_and_the_same_on_every_rank(ranks: list[Ballot]) -> None:
    agreed = agree(*ranks)
    verdicts = [read_verdict(rank, agreed) for rank in ranks]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert read_verdict(ranks[0], tuple(agreed)) == verdicts[0], "read place by place, it says the same"
    assert verdicts[0].votes == tuple(
        min(wishes) for wishes in zip(*(rank.votes for rank in ranks), strict=True)
    )
    assert verdicts[0].compute == all(rank.may_compute for rank in ranks)
    assert verdicts[0].leave == all(rank.may_leave for rank in ranks)
    assert verdicts[0].connects == min(rank.connects for rank in ranks)


@given(st.lists(ballots, min_size=1, max_size=4))
def test_the_reason_of_an_abort_is_one_that_a_rank_gave(ranks: list[Ballot]) -> None:
    verdict = read_verdict(ranks[0], agree(*ranks))
    for place in range(PLACES):
        given_here = {
            rank.reasons[place] for rank in ranks if rank.votes[place] is Vote.ABORT and place in rank.reasons
        }
        assert (place in verdict.reasons) == bool(given_here)
        assert not given_here or verdict.reasons[place] in given_here


@given(ballots)
def test_words_fit_the_collective(ballot: Ballot) -> None:
    words = ballot.encode()
    assert len(words) == HEADER + PLACES
    assert all(type(word) is int and -INT64 <= word < INT64 for word in words)


@given(st.lists(st.integers(0, 2**62 - 1), min_size=2, max_size=4))
def test_divergence_detected_by_digest(digests: list[int]) -> None:
    ranks = [Ballot(1, digest, True, True, [Vote.STAY]) for digest in digests]
    agreed = agree(*ranks)
    if len(set(digests)) == 1:
        read_verdict(ranks[0], agreed)
        return
    for rank in ranks:
        with pytest.raises(RostersDiverged, match="ranks hold different rooms"):
            read_verdict(rank, agreed)


def test_divergence_detected_by_turn() -> None:
    ranks = [Ballot(turn, 0, True, True, []) for turn in (4, 5)]
    for rank in ranks:
        with pytest.raises(RostersDiverged, match=r"different turns \(4\.\.5\)"):
            read_verdict(rank, agree(*ranks))


def test_divergence_detected_by_shape() -> None:
    mine = Ballot(1, 0, True, True, [Vote.STAY] * 2)
    with pytest.raises(RostersDiverged, match="2 places here"):
        read_verdict(mine, Ballot(1, 0, True, True, [Vote.STAY]).encode())
