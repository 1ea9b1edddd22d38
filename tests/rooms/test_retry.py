"""Is it decided for every reason whether its request goes on, and whom the next room avoids?"""

import pytest

from services.rooms.errors import Reason
from services.rooms.phases import Side
from services.rooms.retry import GUILT, LEFT_S_MIN, RETRIED, RetryBounds, guilty, may_retry

BOTH = {Side.PREFILL, Side.DECODE}
BOUNDS = RetryBounds(rooms_max=3, wait_s=1.0)


def test_every_reason_is_decided() -> None:
    assert set(GUILT) == set(Reason)


def test_the_clients_own_ends_and_ours_are_final() -> None:
    final = {Reason.ANSWERED, Reason.CLIENT_GONE, Reason.CANCELLED, Reason.BOOTSTRAP_LOST}
    assert set(Reason) - RETRIED == final
    for reason in final:
        assert not may_retry(reason, 1, 1_000.0, BOUNDS)
        assert guilty(reason, Side.DECODE) == set()


def test_rooms_and_time_are_bounded() -> None:
    assert may_retry(Reason.DECODE_LOST, 2, LEFT_S_MIN, BOUNDS)
    assert not may_retry(Reason.DECODE_LOST, 3, 1_000.0, BOUNDS)
    assert not may_retry(Reason.DECODE_LOST, 1, LEFT_S_MIN - 0.01, BOUNDS)
    assert not may_retry(Reason.DECODE_LOST, 1, 1_000.0, RetryBounds(rooms_max=1))


@pytest.mark.parametrize("teller", [None, *Side])
def test_a_lost_worker_is_guilty_whoever_tells(teller: Side | None) -> None:
    assert guilty(Reason.PREFILL_LOST, teller) == {Side.PREFILL}
    assert guilty(Reason.DECODE_LOST, teller) == {Side.DECODE}


@pytest.mark.parametrize("reason", [Reason.ENGINE_FAILED, Reason.DRAINING, Reason.REFUSED])
def test_who_says_that_it_cannot_is_guilty(reason: Reason) -> None:
    assert [guilty(reason, side) for side in Side] == [{side} for side in Side]
    assert guilty(reason, None) == BOTH, "nobody knows which"


@pytest.mark.parametrize("reason", [Reason.TRANSFER_FAILED, Reason.CONNECT_FAILED, Reason.DEADLINE])
def test_what_lay_between_them_is_either_ones(reason: Reason) -> None:
    assert guilty(reason, Side.PREFILL) == BOTH
