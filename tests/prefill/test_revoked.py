"""Tests of rooms whose receiver revoked its memory, while no write reports its end."""

from collections.abc import AsyncIterator

import pytest

from baton.ids import Incarnation, RoomId
from baton.rooms.errors import NotConnected
from baton.rooms.phases import Phase
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.transfer_faults import FaultPlan
from baton.wire.baton.v1 import group_pb2
from tests.prefill import toy
from tests.prefill.bench import DECODE, PrefillBench, Receiver, connect_request
from tests.prefill.test_group import Group, refuses

PROMPT = tuple(range(100, 110))
GRANTED = (9, 2, 3)
OLDER, NEWER = Incarnation(DECODE - 1), Incarnation(DECODE + 1)
NEVER = 10**9
"""Steps for which a write is held, so that its end is never seen."""


class Pair:
    """A pair in which room 1 is being written to one exposure of the decode worker's memory."""

    def __init__(self, hold_steps: int = NEVER) -> None:
        self.fabric = MemoryFabric(FaultPlan(hold_share=1.0, hold_steps=hold_steps))
        self.receiver = Receiver(self.fabric)
        self.bench = PrefillBench(self.fabric)
        self.bench.connect(self.receiver)

    async def write(self) -> None:
        self.caller = await self.bench.run(toy.request("1", PROMPT))
        await self.bench.grant(1, GRANTED)
        await self.bench.turns(3)
        await self.bench.step_end()
        await self.bench.turns(2)
        assert self.fabric.puts_under_way > 0

    async def expose(self, exposure: Incarnation, *, reachable: bool = True) -> Receiver:
        """Connect as the decode worker that exposes its memory under this id."""
        receiver = Receiver(self.fabric, exposure)
        if not reachable:
            receiver.transfer.close()
        await self.bench.enter(group_pb2.Command(connect=connect_request(receiver)))
        return receiver

    async def settle(self) -> None:
        for _ in range(50):
            if not self.bench.step_thread.free:
                await self.bench.step_end()
            await self.bench.turn()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    await made.write()
    yield made
    made.bench.close()


async def test_room_ends_memory_that_was_taken_back_is_proof_enough(pair: Pair) -> None:
    """The room had failed before. Its close is answered."""
    await pair.bench.cancel(1)
    closed = pair.bench.closing(1)
    await pair.settle()
    assert pair.bench.work.roster.get(RoomId(1)).phase is Phase.FAILED
    assert not closed.done()
    await pair.expose(NEWER)
    await pair.settle()
    await closed
    assert await pair.caller.outcome() == "cancelled"
    assert pair.fabric.puts_under_way > 0, "nobody has seen them end"
    pair.bench.assert_empty()


async def test_a_room_that_still_runs_ends_at_once_and_says_why(pair: Pair) -> None:
    await pair.expose(NEWER)
    await pair.settle()
    assert await pair.caller.outcome() == "memory_revoked"
    assert "decode worker decode-0 took its memory back" in pair.caller.replies[-1].outcome.cause.text
    pair.bench.assert_empty()


async def test_it_is_true_whether_or_not_the_memory_can_be_reached_where_it_is_now(pair: Pair) -> None:
    with pytest.raises(NotConnected):
        await pair.expose(NEWER, reachable=False)
    await pair.settle()
    assert await pair.caller.outcome() == "memory_revoked"
    pair.bench.assert_empty()


async def test_source_pinned_a_connect_that_comes_late_proves_nothing(pair: Pair) -> None:
    """The late connect names the exposure before the present one. Writes to the present one may still
    land."""
    with pytest.raises(NotConnected, match=f"exposure {OLDER:#x} is older than {DECODE:#x}"):
        await pair.expose(OLDER)
    await pair.bench.cancel(1)
    await pair.settle()
    sender = pair.bench.work.roster.get(RoomId(1))
    assert (sender.phase, sender.proof) == (Phase.FAILED, None)
    assert pair.bench.transfer.pending(DECODE) > 0
    await pair.expose(NEWER)
    await pair.settle()
    pair.bench.assert_empty()


async def test_incarnation_a_connect_that_comes_late_takes_no_way_from_a_newer_exposure() -> None:
    """The room that is being written, and the next one, go on as if the late connect had not come."""
    pair = Pair(hold_steps=100)
    await pair.write()
    with pytest.raises(NotConnected):
        await pair.expose(OLDER)
    for _ in range(20):
        await pair.settle()
    assert await pair.caller.outcome() == ""
    assert pair.receiver.record(0, 1, 5) is not None
    await pair.bench.run(toy.request("2", PROMPT))
    await pair.bench.grant(2, GRANTED)
    for _ in range(20):
        await pair.settle()
    pair.bench.assert_empty()
    pair.bench.close()


async def test_another_receivers_exposures_say_nothing_of_this_ones(pair: Pair) -> None:
    wire = connect_request(Receiver(pair.fabric, NEWER))
    wire.receiver = NEWER
    await pair.bench.enter(group_pb2.Command(connect=wire))
    await pair.settle()
    assert pair.bench.work.roster.get(RoomId(1)).cause is None


async def test_rooms_without_a_destination_wait_for_one_in_the_new_place(pair: Pair) -> None:
    caller = await pair.bench.run(toy.request("2", PROMPT))
    await pair.expose(NEWER)
    await pair.settle()
    assert caller.heard == ["accepted"]
    assert pair.bench.work.roster.get(RoomId(2)).phase is Phase.BOOTSTRAPPING
    await pair.bench.cancel(2)
    await pair.settle()
    pair.bench.assert_empty()


@pytest.mark.parametrize("unreached", [None, 0, 1])
async def test_every_rank_has_the_proof_whichever_reaches_the_new_place(
    unreached: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group()
    told = await group.writing()
    for bench, receiver in zip(group.ranks, group.receivers, strict=True):
        assert bench.transfer.pending(receiver.endpoint.incarnation) > 0
    group.receivers = [Receiver(group.fabric, Incarnation(each)) for each in (23, 1_023)]
    if unreached is not None:
        refuses(group.ranks[unreached], monkeypatch)
    (problem,) = await group.ask(group_pb2.Command(connect=group.request()))
    assert isinstance(problem, NotConnected) == (unreached is not None)
    await group.settle()
    assert await told == "memory_revoked"
    for each in group.ranks:
        each.close()
