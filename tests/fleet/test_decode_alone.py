"""Tests of placement on a decode worker alone, where no prefill worker can take the room."""

from dataclasses import replace

import pytest

from baton.fleet.need import Need
from baton.fleet.room_entry import RoomPhase
from baton.ids import RoomId
from baton.rooms.errors import LocalBug, NoCapacity, NoneReady, NoSuchWorker, TooLarge
from baton.rooms.phases import Side
from baton.rooms.worker_load import WorkerLoad
from tests.fleet.test_registry import D1, D2, P1, P2, apart, registry_of

NEED = Need(10, 20, may_be_local=True)
C1, C2 = replace(D1, computes=True), replace(D2, computes=True)


def busy(entered: RoomId) -> WorkerLoad:
    """Return the load of a decode worker that has no free pages and on which many rooms wait."""
    return WorkerLoad((0,), (0,), 64, running=64, running_max=64, entered=entered, number=1)


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
    stack = registry_of(replace(P1, rooms_max=1), C1)
    assert stack.place(NEED)[0] is stack.worker(P1.incarnation)
    stack.open_room("request", stack.place(NEED), NEED, 0)
    with pytest.raises(NoCapacity, match="every prefill worker is full"):
        stack.place(NEED)
    stack.leave(P1.incarnation, "exited", 0)
    assert stack.place(NEED)[0] is None


def test_a_prefill_worker_whose_stream_broke_is_waited_for_by_those_alone_that_need_it() -> None:
    stack = registry_of(P1, C1)
    stack.suspect(P1.incarnation)
    assert stack.place(NEED) == (None, stack.worker(C1.incarnation))
    lease = "a stream to every prefill worker broke: waiting for one to renew its lease"
    with pytest.raises(NoCapacity, match=lease):
        stack.place(replace(NEED, may_be_local=False))
    stack.suspect(C1.incarnation)
    with pytest.raises(NoCapacity, match=lease):
        stack.place(NEED)
    stack.renew(P1.incarnation, 0)
    stack.renew(C1.incarnation, 0)
    assert stack.place(NEED)[0] is stack.worker(P1.incarnation)


def test_a_prompt_that_is_too_large_for_prefill_goes_to_a_decode_worker_that_holds_it() -> None:
    large = replace(NEED, prompt_tokens=600, tokens=900)
    stack = registry_of(replace(P1, tokens_max=500), D1, C2)
    assert stack.place(large) == (None, stack.worker(C2.incarnation))
    assert stack.place(NEED)[0] is not None
    assert (stack.tokens_max(Side.PREFILL), stack.tokens_max_alone) == (500, 1_000)
    for refused in (replace(large, may_be_local=False), replace(large, tokens=10**6)):
        with pytest.raises(TooLarge, match="no prefill worker can hold 600 tokens: the largest holds 500"):
            stack.place(refused)
    stack.drain(C2.incarnation)
    with pytest.raises(NoneReady, match="no decode worker is ready"):
        stack.place(large)
    stack.leave(C2.incarnation, "exited", 0)
    with pytest.raises(TooLarge, match="no prefill worker"):
        stack.place(large)
    assert stack.tokens_max_alone == 0


def test_no_prefill_worker_that_is_ready_holds_it_and_decode_does() -> None:
    large = replace(NEED, prompt_tokens=600, tokens=900)
    stack = registry_of(replace(P1, tokens_max=500), P2, C1)
    assert stack.place(large)[0] is stack.worker(P2.incarnation)
    stack.drain(P2.incarnation)
    assert stack.place(large) == (None, stack.worker(C1.incarnation))


def test_who_waits_is_looked_past_where_nobody_at_all_can_get_a_room() -> None:
    """`all_full`: decode has no space, or prefill has none and no request may be served by decode alone."""
    stack = registry_of(C1)
    assert not stack.all_full, "it may be asked alone"
    entry = stack.open_room("request", stack.place(NEED), NEED, 0)
    stack.update_load(C1.incarnation, busy(entry.id), 0)
    assert stack.all_full
    assert registry_of(D1).all_full
    assert registry_of(P1).all_full
    assert not registry_of(P1, D1).all_full
    full = registry_of(replace(P1, rooms_max=0), C1)
    assert full.all_full, "a prefill worker that is there is waited for"
    apart(full, P1, C1)
    assert not full.all_full, "but by none that it does not reach"
    assert not registry_of(replace(P1, rooms_max=0, tokens_max=500), C1).all_full, "nor by the largest"
    assert registry_of(replace(P1, rooms_max=0, tokens_max=500), D1).all_full


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
    stack.mark_delivered(entry.id, entry.sides)
    assert stack.orphans(10**9) == [entry], "it is open for too long, and not for want of an opener"
    stack.end(entry.id, None, 0)
    stack.side_retired(entry.id, Side.DECODE)
    assert entry.phase is RoomPhase.RETIRED
    assert stack.open_count() == 0
    assert not stack.has_open_rooms(C1.incarnation)


def test_a_room_that_was_retracted_is_left_its_worker_and_goes_back_to_one_that_drains_alone_too() -> None:
    stack = registry_of(C1)
    stack.update_load(C1.incarnation, busy(RoomId(0)), 0)
    assert stack.reserve(NEED) == C1.incarnation
    stack.release_reserved()
    drained = registry_of(C2)
    drained.open_room("request", drained.place(NEED), NEED, 0)
    drained.drain(C2.incarnation)
    assert drained.place(NEED, back=C2.incarnation) == (None, drained.worker(C2.incarnation))


def test_back_to_a_worker_that_drains_alone_where_it_is_reached_by_nobody() -> None:
    stack = registry_of(P1, P2, C1)
    stack.open_room("request", stack.place(NEED), NEED, 0)
    stack.drain(C1.incarnation)

    def back(need: Need = NEED) -> object:
        return stack.place(need, back=C1.incarnation)[0]

    assert back() is stack.worker(P2.incarnation)
    apart(stack, P2, C1)
    assert back() is stack.worker(P1.incarnation)
    apart(stack, P1, C1)
    assert back() is None
    assert back(replace(NEED, may_be_local=False)) is not None, "no other way is left"
    stack.suspect(P1.incarnation)
    stack.suspect(P2.incarnation)
    assert back() is None
    with pytest.raises(NoneReady, match="no decode worker is ready"):
        stack.place(NEED)


def test_back_to_a_worker_that_drains_it_is_the_prefill_worker_that_reaches_it_that_is_waited_for() -> None:
    stack = registry_of(replace(P1, rooms_max=1), P2, C1)
    entry = stack.open_room("request", (stack.worker(P1.incarnation), stack.worker(C1.incarnation)), NEED, 0)
    stack.drain(C1.incarnation)
    apart(stack, P2, C1)
    with pytest.raises(NoCapacity, match="every prefill worker that reaches decode-1 is full") as full:
        stack.place(NEED, back=C1.incarnation)
    assert full.value.side is Side.PREFILL
    stack.side_retired(entry.id, Side.PREFILL)
    assert stack.place(NEED, back=C1.incarnation)[0] is stack.worker(P1.incarnation)
