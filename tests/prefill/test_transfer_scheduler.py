"""Tests of the bytes that a worker's rooms send in one turn, the order of rooms, and the metrics of
transfers."""

from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest

from baton.ids import Incarnation, RoomId
from baton.prefill.room_transfer import WINDOWS_A_TURN_MAX, Quota
from baton.rooms.phases import Phase
from baton.testing.memory_transfer import MemoryTransfer
from baton.testing.transfer_faults import FaultPlan
from baton.transfer.transfer_protocol import PutId, Run, kv_region
from baton.worker.mailbox import Mailbox
from baton.worker.polling import DRAIN_S, POLL_S
from tests.prefill import toy
from tests.prefill.test_group import Group
from tests.prefill.test_turn import Pair, settle

PROMPT = tuple(range(100, 116))
"""A prompt of four pages, each a transfer window of its own."""
ROOMS = 3
BUSY = "baton_kv_transfer_busy_seconds_total"


@pytest.fixture
async def slow() -> AsyncIterator[Pair]:
    """Writes end when somebody has looked often."""
    made = Pair(FaultPlan(hold_share=1.0, hold_steps=100))
    yield made
    made.bench.close()


@pytest.fixture
async def waiting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Pair, list[int]]]:
    """Several computed rooms of which nothing was sent, and the growing list of rooms by the windows that
    leave."""
    made, posted = Pair(), list[int]()
    put = MemoryTransfer.put

    def noted(transfer: MemoryTransfer, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        if region == kv_region(0):
            posted.append(1 + runs[0][1] // toy.GROUP.page_bytes // 4)
        return put(transfer, peer, region, runs)

    monkeypatch.setattr(MemoryTransfer, "put", noted)
    with monkeypatch.context() as patch:
        a_turn(patch, 0)
        for room in range(1, ROOMS + 1):
            await made.bench.run(toy.request(str(room), PROMPT))
            await made.bench.grant(room, tuple(range(4 * room - 4, 4 * room)), slot=room)
        while not all(room.complete for room in made.bench.work.roster):
            if not made.bench.step_thread.free:
                await made.bench.step_end()
            await made.bench.turn()
        await made.bench.turn()
    assert posted == []
    yield made, posted
    made.bench.close()


def a_turn(monkeypatch: pytest.MonkeyPatch, windows: int) -> None:
    monkeypatch.setattr("baton.prefill.transfer_scheduler.Quota", partial(Quota, windows))


async def test_a_few_windows_leave_in_a_turn_however_many_rooms_wait(waiting: tuple[Pair, list[int]]) -> None:
    pair, posted = waiting
    before = 0
    while len(posted) < ROOMS * 4:
        await pair.bench.turn()
        assert len(posted) - before <= WINDOWS_A_TURN_MAX
        before = len(posted)
    await settle(pair.bench)


@pytest.mark.parametrize("windows", [1, 2, 4])
async def test_rooms_send_in_turns(
    waiting: tuple[Pair, list[int]], monkeypatch: pytest.MonkeyPatch, windows: int
) -> None:
    """This holds for few windows in all, and for rooms that could use many of them."""
    pair, posted = waiting
    a_turn(monkeypatch, windows)
    turns = 0
    while set(posted) != set(range(1, ROOMS + 1)):
        await pair.bench.turn()
        turns += 1
        assert len(posted) <= turns * windows
        assert turns <= ROOMS
    await settle(pair.bench)
    assert sorted(posted) == sorted([1, 2, 3] * 4)


async def test_a_room_that_has_gone_leaves_its_turn_to_the_others(
    waiting: tuple[Pair, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, posted = waiting
    a_turn(monkeypatch, 1)
    await pair.bench.turn()
    assert posted == [1]
    await pair.bench.cancel(2)
    await settle(pair.bench)
    assert sorted(posted) == sorted([1, 3] * 4)


async def test_records_and_seals_do_not_wait_for_others_windows(
    waiting: tuple[Pair, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, posted = waiting
    a_turn(monkeypatch, 4)
    while posted.count(1) < 4:
        await pair.bench.turn()
    a_turn(monkeypatch, 0)
    await pair.bench.turns(8)
    assert pair.receiver.record(1, 1, 5) is not None
    assert len(posted) < ROOMS * 4
    monkeypatch.undo()
    await settle(pair.bench)


# ---- how often it looks


async def rest_s(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> float:
    """Take turns until the worker rests, and return the bound of that rest, seconds."""
    bounds: list[float] = []

    async def rest(_: Mailbox, bound_s: float) -> bool:
        bounds.append(bound_s)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Mailbox, "rest", rest)
        while not bounds:
            await pair.bench.work.rest()
    return bounds[0]


async def write(pair: Pair) -> None:
    """Compute room 1, and begin to write its pages and record."""
    await pair.bench.run(toy.request("1", PROMPT[:8]))
    await pair.bench.grant(1, (9, 2))
    while pair.fabric.puts_under_way < 2:
        if not pair.bench.step_thread.free:
            await pair.bench.step_end()
        await pair.bench.turn()


async def test_a_room_that_failed_is_looked_at_less_often_than_one_that_is_written(
    slow: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caller waits for it to the millisecond, and the writes that it waits for may take long."""
    await write(slow)
    assert await rest_s(slow, monkeypatch) == POLL_S
    await slow.bench.cancel(1)
    assert slow.bench.work.roster.get(RoomId(1)).phase is Phase.FAILED
    assert slow.fabric.puts_under_way > 0
    assert await rest_s(slow, monkeypatch) == DRAIN_S
    await settle(slow.bench)
    assert await rest_s(slow, monkeypatch) > DRAIN_S


# ---- what is counted


async def test_what_the_pages_of_a_room_took_is_counted_once_they_are_written(slow: Pair) -> None:
    await write(slow)
    slow.bench.clock.advance(50)
    room = slow.bench.work.roster.get(RoomId(1))
    while not room.written:
        await slow.bench.turn()
    assert slow.bench.gauge(BUSY) == pytest.approx(0.05)
    while not slow.fabric.puts_under_way:
        await slow.bench.turn()
    await slow.bench.turn()
    slow.bench.clock.advance(70)
    await settle(slow.bench)
    assert slow.bench.gauge(BUSY) == pytest.approx(0.05)
    assert room.overlap.spent_us == 50_000, "the record and the seal are no pages"
    assert slow.bench.gauge("baton_kv_transfer_seconds_count") == 1


async def test_what_the_pages_of_a_room_that_failed_took_is_counted_too(slow: Pair) -> None:
    await write(slow)
    slow.bench.clock.advance(50)
    await slow.bench.turn()
    await slow.bench.cancel(1)
    await settle(slow.bench)
    assert slow.bench.gauge(BUSY) == pytest.approx(0.05)
    assert slow.bench.gauge("baton_kv_transfer_seconds_count") == 0


async def test_every_rank_counts_what_its_pages_took() -> None:
    group = Group()
    told = await group.writing()
    for each in group.ranks:
        each.clock.advance(50)
    for receiver in group.receivers:
        group.fabric.resume(receiver.endpoint.incarnation)
    await group.settle()
    assert await told == ""
    assert [each.gauge(BUSY) for each in group.ranks] == pytest.approx([0.05, 0.05])
    assert [each.gauge("baton_kv_transfer_seconds_count") for each in group.ranks] == [1, 0]
    for each in group.ranks:
        each.close()
