"""Is what waits in an inbox bounded, in number and in bytes?"""

from services.transfer.inbox import Inbox
from services.transfer.interface import NOTICE_BYTES_MAX, NOTICES_PER_CALL_MAX, NOTICES_WAITING_MAX


def drained(inbox: Inbox) -> list[list[tuple[str, bytes]]]:
    calls = []
    while taken := inbox.take():
        calls.append(taken)
    return calls


def test_the_newest_are_lost_past_the_bound() -> None:
    inbox = Inbox()
    inbox.arrived("a", (number.to_bytes(4, "big") for number in range(NOTICES_WAITING_MAX + 7)))
    inbox.arrived("b", [b"late"])
    calls = drained(inbox)
    assert max(map(len, calls)) == NOTICES_PER_CALL_MAX
    taken = [notice for call in calls for notice in call]
    assert taken == [("a", number.to_bytes(4, "big")) for number in range(NOTICES_WAITING_MAX)]
    inbox.arrived("b", [b"room again"])
    assert drained(inbox) == [[("b", b"room again")]]


def test_a_payload_that_no_endpoint_of_ours_sends_is_dropped() -> None:
    inbox = Inbox()
    inbox.arrived("a", [b"x" * (NOTICE_BYTES_MAX + 1), b"y" * NOTICE_BYTES_MAX])
    assert drained(inbox) == [[("a", b"y" * NOTICE_BYTES_MAX)]]
