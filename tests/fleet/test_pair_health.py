"""Tests that a pair of workers which fails to connect gets no requests until its own canary succeeds."""

from baton.fleet.pair_health import BROKEN_AFTER, PairHealth
from baton.ids import Incarnation
from baton.rooms.errors import Cause, Reason

FAILED = Cause(Reason.CONNECT_FAILED, "no way there")
LOST = Cause(Reason.DECODE_LOST, "gone")
PAIR, OTHER = (Incarnation(1), Incarnation(2)), (Incarnation(1), Incarnation(3))


def broken() -> PairHealth:
    pairs = PairHealth()
    for number in range(1, BROKEN_AFTER + 1):
        assert pairs.ended(PAIR, FAILED, canary=False) == (number == BROKEN_AFTER)
    return pairs


def test_a_pair_that_fails_to_connect_again_and_again_is_broken_and_no_other_is() -> None:
    pairs = broken()
    assert pairs.broken() == [PAIR]
    assert not pairs.is_broken(OTHER)
    pairs.ended(PAIR, FAILED, canary=True)
    assert pairs.broken() == [PAIR]


def test_an_answer_between_two_failures_starts_the_count_anew_and_other_failures_do_not_count() -> None:
    pairs = PairHealth()
    for _ in range(3):
        for _ in range(BROKEN_AFTER - 1):
            pairs.ended(PAIR, FAILED, canary=False)
            pairs.ended(PAIR, LOST, canary=False)
        pairs.ended(PAIR, None, canary=False)
    assert pairs.broken() == []
    assert not pairs.failures


def test_only_a_canary_through_that_very_pair_mends_it() -> None:
    pairs = broken()
    assert not pairs.ended(PAIR, None, canary=False)
    assert not pairs.ended(OTHER, None, canary=True)
    assert pairs.broken() == [PAIR]
    assert pairs.ended(PAIR, None, canary=True)
    assert pairs.broken() == []


def test_a_worker_that_is_gone_is_forgotten_with_its_pairs() -> None:
    pairs = broken()
    pairs.forget(Incarnation(3))
    assert pairs.broken() == [PAIR]
    pairs.forget(Incarnation(2))
    assert not pairs.failures
