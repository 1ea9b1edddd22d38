"""Tests of the conditions under which memory is revoked from senders that do not answer."""

import pytest

from baton.ids import Generation, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.evidence import Connected, Failed, Fenced, Proof
from baton.rooms.phases import Vote
from baton.rooms.quarantine import HURRY, in_quarantine, revocation_due
from baton.rooms.receiver import Receiver
from tests.rooms.group import receiver

POOL = 100


def failed(room: int, pages: int, at_ms: int = 0, *, exposed: bool = True) -> Receiver:
    """Return a room that failed at `at_ms`, with its memory exposed before or not."""
    made = receiver(RoomId(room), 0, expected=pages)
    made.note(Connected())
    made.settle(Vote.ADVANCE, 0)
    if exposed:
        made.settle(Vote.ADVANCE, 0)
        made.expose(Generation(room), (0,))
    made.note(Failed(Cause(Reason.CANCELLED, "no longer wanted")))
    made.settle(Vote.ABORT, at_ms)
    return made


def test_a_room_whose_proof_is_overdue_calls_for_it() -> None:
    rooms = [failed(1, 2), failed(2, 2, 500)]
    fence_ms = rooms[0].deadlines.fence_ms
    assert not revocation_due(rooms, fence_ms - 1, (POOL,))
    assert revocation_due(rooms, fence_ms, (POOL,))


def test_it_comes_sooner_when_half_the_pool_is_in_quarantine() -> None:
    rooms = [failed(1, POOL // 2), failed(2, 1)]
    sooner_ms = rooms[0].deadlines.fence_ms // HURRY
    assert not revocation_due(rooms, sooner_ms - 1, (POOL,))
    assert revocation_due(rooms, sooner_ms, (POOL,))
    assert not revocation_due(rooms[:1], sooner_ms, (POOL,)), "half is not more than half"


@pytest.mark.parametrize("proof", [each for each in Proof if each is not Proof.DONE])
def test_a_proven_room_calls_for_nothing(proof: Proof) -> None:
    room = failed(1, POOL)
    room.note(Fenced(proof))
    assert not in_quarantine(room)
    assert not revocation_due([room], 10**9, (POOL,))


def test_a_room_that_stays_although_its_seal_was_read_here_calls_for_it() -> None:
    """Another rank has not read the seal, and the sender may never answer."""
    room = failed(1, POOL)
    room.note(Fenced(Proof.DONE))
    assert not in_quarantine(room)
    assert not revocation_due([room], room.deadlines.fence_ms // HURRY - 1, (POOL,))
    assert revocation_due([room], room.deadlines.fence_ms, (POOL,))


def test_nothing_that_was_not_exposed_is_in_quarantine() -> None:
    assert not in_quarantine(failed(1, 2, exposed=False))
    live = receiver(RoomId(2), 0, expected=2)
    assert not revocation_due([live], 10**9, (POOL,))
