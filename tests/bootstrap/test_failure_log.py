"""Tests that a burst of failed rooms is logged in a few lines that leave none out."""

import pytest

from baton.bootstrap.failure_log import FailureLog
from baton.ids import RoomId
from baton.rooms.errors import Cause, Reason
from tests.support.manual_clock import ManualClock

LOST, BROKEN = Cause(Reason.PREFILL_LOST, "it is gone"), Cause(Reason.TRANSFER_FAILED, "it broke")
GONE = Cause(Reason.CLIENT_GONE, "the client hung up")


def test_a_burst_is_one_line_a_reason_and_second_and_none_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock(now_ms=1_000)
    failures = FailureLog(clock)
    for room in range(1, 301):
        failures.log(RoomId(room), LOST)
    failures.log(RoomId(301), BROKEN)
    failures.log(RoomId(302), GONE)
    failures.log_rest()
    clock.advance(1_000)
    failures.log(RoomId(303), LOST)
    failures.log(RoomId(304), LOST)
    clock.advance(1_000)
    failures.log_rest()
    clock.advance(1_000)
    failures.log_rest()
    told = [(each.getMessage(), _fields(each)) for each in caplog.records if each.levelname == "WARNING"]
    assert [(message, fields["reason"]) for message, fields in told] == [
        ("room failed", "prefill_lost"),
        ("room failed", "transfer_failed"),
        ("room failed", "prefill_lost"),
        ("more rooms failed", "prefill_lost"),
    ]
    assert [fields.get("more") or fields.get("rooms") for _, fields in told] == [None, None, 299, 1]


def _fields(record: object) -> dict[str, object]:
    fields: dict[str, object] = record.baton_fields  # type: ignore[attr-defined]
    return fields
