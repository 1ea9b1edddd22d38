"""Which decode worker gets a room alone, where there is no prefill worker for it, and what is kept of it?"""

from dataclasses import replace

import pytest

from services.ids import RoomId
from services.rooms.errors import LocalBug, NoCapacity, NoneReady, NoSuchWorker
from services.rooms.load import WorkerLoad
from services.rooms.phases import Side
from services.rooms.placement import Need
from services.rooms.registry_records import RoomPhase
from tests.rooms.test_registry import D1, D2, P1, apart, registry_of

NEED = Need(10, 20, may_be_local=True)
C1, C2 = replace(D1, computes=True), replace(D2, computes=True)


def test_of_those_that_compute_the_least_full_gets_it_and_avoided_ones_last() -> None:
    stack = registry_of(D1, C2)
    assert stack.place(NEED) == (None, stack.worker(C2.incarnation))
    assert stack.place(NEED, avoid={C2.incarnation})[1].facts == C2, "there is no other"
    with pytest.raises(NoneReady, match="no prefill worker is ready"):
        stack.place(replace(NEED, may_be_local=False))
    with pytest.raises(NoneReady, match="no prefill worker is ready"):
        registry_of(D1).place(NEED)
    with pytest.raises(NoSuchWorker):
        stack.place(replace(NEED, tokens=10 * C2.tokens_max))


def test_with_a_prefill_worker_it_is_a_pair_again_and_one_that_is_full_is_waited_for() -> None:
    stack = registry_of(P1, C1)
    assert stack.place(NEED)[0] is stack.worker(P1.incarnation)
    stack.suspect(P1.incarnation)
    with pytest.raises(NoCapacity, match="waiting for one to renew its lease"):
        stack.place(NEED)
    stack.leave(P1.incarnation, "exited", 0)
    assert stack.place(NEED)[0] is None


def test_a_pair_that_does_not_connect_is_passed_by_alone() -> None:
    stack = registry_of(P1, C1)
    apart(stack, P1, C1)
    assert stack.place(NEED) == (None, stack.worker(C1.incarnation))
    assert stack.place(replace(NEED, may_be_local=False))[0] is stack.worker(P1.incarnation)
    assert stack.unreachable() == []


def test_its_room_is_over_when_decode_has_given_it_back() -> None:
    stack = registry_of(C1)
    entry = stack.open_room("request", stack.place(NEED), NEED, 0)
    assert (entry.sides, entry.pair, entry.waiting_for) == ((Side.DECODE,), None, {Side.DECODE})
    with pytest.raises(LocalBug, match="has no prefill worker"):
        entry.worker(Side.PREFILL)
    stack.taken(entry.id, entry.sides)
    assert stack.unended(10**9) == [entry], "it is open for too long, and not for want of an opener"
    stack.end(entry.id, None, 0)
    stack.side_retired(entry.id, Side.DECODE)
    assert entry.phase is RoomPhase.RETIRED
    assert stack.open_count() == 0
    assert not stack.has_open_rooms(C1.incarnation)


def test_a_room_that_was_retracted_is_left_its_worker_and_goes_back_to_one_that_drains_alone_too() -> None:
    stack = registry_of(C1)
    said = WorkerLoad((0,), (0,), 0, running=64, running_max=64, entered=RoomId(0), number=1)
    stack.hear_load(C1.incarnation, said, 0)
    assert stack.reserve(NEED) == C1.incarnation
    stack.reserve_none()
    drained = registry_of(C2)
    drained.open_room("request", drained.place(NEED), NEED, 0)
    drained.drain(C2.incarnation)
    assert drained.place(NEED, back=C2.incarnation) == (None, drained.worker(C2.incarnation))
