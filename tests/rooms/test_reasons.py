"""Does one table say of every reason what follows from it?"""

import pytest

from services.rooms.errors import Reason
from services.rooms.phases import Side
from services.rooms.reasons import LOST, REASONS, Fault
from services.rooms.retry import guilty


def test_every_reason_has_its_row_in_the_order_in_which_a_verdict_weighs_them() -> None:
    assert list(REASONS) == list(Reason)


def test_what_is_no_failure_is_its_callers_doing() -> None:
    assert {each for each, facts in REASONS.items() if not facts.is_failure} == {
        Reason.ANSWERED,
        Reason.CLIENT_GONE,
    }
    assert {each for each, facts in REASONS.items() if facts.fault is Fault.CALLER} == {
        Reason.ANSWERED,
        Reason.CLIENT_GONE,
        Reason.CANCELLED,
    }


def test_only_an_answer_is_not_counted() -> None:
    assert [each for each, facts in REASONS.items() if not facts.is_counted] == [Reason.ANSWERED]


@pytest.mark.parametrize("side", list(Side))
def test_a_lost_worker_is_the_one_that_the_next_room_avoids(side: Side) -> None:
    assert guilty(LOST[side], None) == {side}


def test_the_next_room_avoids_somebody_for_exactly_the_reasons_that_are_retried() -> None:
    for reason, facts in REASONS.items():
        assert bool(guilty(reason, None)) is facts.is_retried
