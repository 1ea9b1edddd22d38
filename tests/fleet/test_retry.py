"""Tests of the retry rules: for each reason, whether its request goes on and which workers the next room
avoids."""

import pytest

from baton.fleet.retry import (
    LEFT_S_MIN,
    PAUSE_S_MAX,
    RETRIED,
    RetryBounds,
    avoided_sides,
    margin_tokens,
    may_retry,
    pause_s,
)
from baton.rooms.errors import Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS

BOTH = {Side.PREFILL, Side.DECODE}
BOUNDS = RetryBounds(rooms_max=3, wait_s=1.0)
PAUSE = 0.363416
"""Expected pause of a request, seconds. It is the same in every process."""


def test_the_clients_own_ends_and_ours_are_final() -> None:
    ended_by_whoever_asked = {Reason.ANSWERED, Reason.CLIENT_GONE, Reason.CANCELLED, Reason.NOT_ADOPTED}
    final = ended_by_whoever_asked | {Reason.BOOTSTRAP_LOST, Reason.ORPHANED, Reason.GRAMMAR_FAILED}
    assert set(Reason) - RETRIED == final | {Reason.LOCAL}, "which ends no room"
    for reason in final:
        assert not may_retry(reason, 1, 1_000.0, BOUNDS)
        assert avoided_sides(reason, Side.DECODE) == set()


def test_retracted_is_no_failure_it_costs_no_room_no_pause_and_avoids_nobody() -> None:
    assert may_retry(Reason.RETRACTED, 1_000_000, 0.01, BOUNDS)
    assert not may_retry(Reason.RETRACTED, 1, 0.0, BOUNDS), "the request's own time is over"
    assert pause_s(Reason.RETRACTED, 5, 7, "request") == 0.0
    assert all(avoided_sides(Reason.RETRACTED, teller) == set() for teller in (None, *Side))


@pytest.mark.parametrize(
    ("had", "left", "choices", "margin"),
    [(16, 500, 1, 64), (16, 5, 1, 5), (400, 500, 1, 100), (400, 500, 3, 300), (10_000, 500, 1, 500)],
)
def test_one_that_was_retracted_comes_back_when_it_can_go_on_and_asks_for_no_more_than_it_may_take(
    had: int, left: int, choices: int, margin: int
) -> None:
    assert margin_tokens(Reason.RETRACTED, had, left, choices) == margin
    assert margin_tokens(Reason.DECODE_LOST, had, left, choices) == 0


def test_rooms_and_time_are_bounded() -> None:
    assert may_retry(Reason.DECODE_LOST, 2, LEFT_S_MIN, BOUNDS)
    assert not may_retry(Reason.DECODE_LOST, 3, 1_000.0, BOUNDS)
    assert not may_retry(Reason.DECODE_LOST, 1, LEFT_S_MIN - 0.01, BOUNDS)
    assert not may_retry(Reason.DECODE_LOST, 1, 1_000.0, RetryBounds(rooms_max=1))


def test_failure_adds_no_load_each_pause_is_longer_and_those_that_failed_together_come_back_apart() -> None:
    for reason in (each for each in RETRIED if REASONS[each].is_attempt):
        for rooms in range(1, 4):
            pauses = [pause_s(reason, rooms, 0, f"request-{each}") for each in range(300)]
            assert max(pauses) <= 3.01 * min(pauses)
            assert len(set(pauses)) == len(pauses)
            assert max(pauses) < min(pause_s(reason, rooms + 1, 0, f"request-{each}") for each in range(300))
    assert max(pause_s(Reason.DEADLINE, 100_000, 7, str(each)) for each in range(100)) <= 1.5 * PAUSE_S_MAX


def test_a_lost_workers_request_goes_on_almost_at_once() -> None:
    assert pause_s(Reason.PREFILL_LOST, 1, 7, "request") <= 0.03
    assert pause_s(Reason.ENGINE_FAILED, 1, 7, "request") >= 0.04


def test_a_pause_is_the_requests_own_whenever_it_is_asked() -> None:
    assert pause_s(Reason.DEADLINE, 2, 7, "request") == pause_s(Reason.DEADLINE, 2, 7, "request")
    assert round(pause_s(Reason.DEADLINE, 2, 7, "request"), 6) == PAUSE


@pytest.mark.parametrize("teller", [None, *Side])
def test_a_lost_worker_is_guilty_whoever_tells(teller: Side | None) -> None:
    assert avoided_sides(Reason.PREFILL_LOST, teller) == {Side.PREFILL}
    assert avoided_sides(Reason.DECODE_LOST, teller) == {Side.DECODE}


@pytest.mark.parametrize("reason", [Reason.ENGINE_FAILED, Reason.DRAINING, Reason.REFUSED])
def test_who_says_that_it_cannot_is_guilty(reason: Reason) -> None:
    assert [avoided_sides(reason, side) for side in Side] == [{side} for side in Side]
    assert avoided_sides(reason, None) == BOTH, "nobody knows which"


@pytest.mark.parametrize("reason", [Reason.TRANSFER_FAILED, Reason.CONNECT_FAILED, Reason.DEADLINE])
def test_what_lay_between_them_is_either_ones(reason: Reason) -> None:
    assert avoided_sides(reason, Side.PREFILL) == BOTH
