"""Tests that the ranks of a decode worker act in step, and that the leader knows the memory of each."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.decode.decode_room import DecodeRoom
from baton.handover.turn import Lap
from baton.ids import RoomId
from baton.pages.record import SEAL_OFFSET, SLOT_BYTES
from baton.parallel.rank_group import GroupBroken
from baton.rooms.errors import Cause, LocalBug, Reason
from baton.rooms.evidence import Failed
from baton.rooms.phases import Phase
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.transfer_faults import FaultPlan
from baton.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc, rooms_pb2
from baton.wire.conversions import cause_to_wire
from baton.worker.turn_loop import run_turns
from tests.decode.bench import Caller, DecodeBench, Sender, tell
from tests.decode.links import asking
from tests.parallel.arrivals import NoArrivals
from tests.patience import PATIENCE_S
from tests.prefill import toy
from tests.prefill.bench import DEADLINE_MS, PAGES
from tests.support.loopback import Loopback
from tests.wire.servers import serving

PROMPT = tuple(range(200, 206))
ASKED = toy.request("1", PROMPT, max_tokens=4)
RANKS = 2


class Group:
    """A group of two ranks with a prefix cache, and a scripted sender."""

    def __init__(
        self, sender: Sender, address: str, pages: int, drafts_by: int = 0, local_gap_ms: int = 0
    ) -> None:
        self.sender = sender
        self.fabric = MemoryFabric(FaultPlan(hold_share=1.0, hold_steps=5_000))
        self.ranks = [
            DecodeBench(
                sender,
                address,
                pages=pages,
                fabric=self.fabric,
                group=group,
                reuse=True,
                drafts_by=drafts_by,
                local_gap_ms=local_gap_ms,
            )
            for group in Loopback(RANKS).groups()
        ]
        self.leader, self.follower = self.ranks

    async def turn(self) -> list[Lap]:
        return await asyncio.gather(*(each.turn() for each in self.ranks))

    async def turns_until(self, holds: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # type: ignore[operator]
                for each in self.ranks:
                    if not each.step_thread.free:
                        await each.step_end()
                await self.turn()
                await asyncio.sleep(0.001)

    async def stream(self, request: object = ASKED, prefill_ms: int | None = None) -> Caller:
        caller = Caller(self.leader, request, 11, prefill_ms)  # type: ignore[arg-type]
        caller.task = asyncio.ensure_future(caller.listen())
        await asyncio.sleep(0)
        await self.turns_until(lambda: bool(caller.replies))
        return caller

    async def granted(self, room: int) -> None:
        await self.turns_until(lambda: room in self.sender.grants)

    async def settle(self) -> None:
        await self.turns_until(
            # A connection that a room asked for goes on when the room is over.
            lambda: not any(len(each.work.roster) for each in self.ranks) and not asking(self.leader.peers)
        )
        for each in self.ranks:
            each.assert_empty()

    def exposed(self) -> list[int]:
        return [each.exposure.id for each in self.ranks]

    def told(self) -> list[list[int]]:
        """Return the incarnations of all ranks' endpoints as each rank knows them, by rank."""
        return [[endpoint.incarnation for endpoint in each.work.endpoints] for each in self.ranks]

    def connected(self) -> list[list[int]]:
        """Return the endpoints that each connect request to the sender named, in order."""
        return [[each.incarnation for each in connect.endpoints] for connect in self.sender.connects]


@asynccontextmanager
async def grouped(pages: int = PAGES, drafts_by: int = 0, local_gap_ms: int = 0) -> AsyncIterator[Group]:
    sender = Sender()
    sender.may_connect.set()

    def add(server: object) -> None:
        inference_pb2_grpc.add_HandoverServiceServicer_to_server(sender, server)

    async with serving(add) as address:
        made = Group(sender, address, pages, drafts_by, local_gap_ms)
        tell(made.ranks)
        try:
            yield made
        finally:
            for each in made.ranks:
                await each.close()


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    async with grouped() as made:
        yield made


async def test_the_sender_is_told_where_the_memory_of_every_rank_is(group: Group) -> None:
    caller = await group.stream()
    await group.granted(1)
    assert group.connected() == [group.exposed()]
    assert len(set(group.exposed())) == RANKS
    assert len(group.sender.connects[0].layouts) == RANKS
    assert group.sender.grants[1].exposure == group.leader.exposure.id
    for each in group.ranks:
        each.land(ASKED)
    await group.settle()
    assert caller.tokens == toy.answer(ASKED)


async def test_the_leader_does_not_rest_on_a_grant_that_leaves_with_the_next_turn(group: Group) -> None:
    caller = await group.stream()
    laps: list[Lap] = []
    async with asyncio.timeout(PATIENCE_S):
        while group.leader.phase(1) is not Phase.TRANSFERRING:
            laps = await group.turn()
            await asyncio.sleep(0.001)
    assert laps == [Lap.BUSY] * RANKS
    assert group.sender.grants == {}, "whether every rank has exposed it is known in the next turn"
    await group.granted(1)
    for each in group.ranks:
        each.land(ASKED)
    await group.settle()
    assert caller.tokens == toy.answer(ASKED)


async def test_exposure_on_page_the_sender_is_told_of_memory_when_every_rank_has_exposed_it(
    group: Group,
) -> None:
    """The other rank is delayed between the verdict and the exposure that follows from it."""
    caller = await group.stream()
    held, follower = asyncio.Event(), group.follower.group
    agree = follower.agree

    async def later(ballot: Sequence[int]) -> list[int]:
        agreed = await agree(ballot)
        await asyncio.sleep(0.01)
        if group.leader.phase(1) is Phase.TRANSFERRING:
            await held.wait()
        return agreed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower, "agree", later)
        turning = asyncio.ensure_future(group.granted(1))
        while group.leader.phase(1) is not Phase.TRANSFERRING:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert group.follower.phase(1) is Phase.WAITING_FOR_INPUT
        assert group.sender.grants == {}
        held.set()
        await turning
    assert group.follower.phase(1) is Phase.TRANSFERRING
    for each in group.ranks:
        each.land(ASKED)
    await group.settle()
    assert caller.tokens == toy.answer(ASKED)


async def test_gate_before_agree_what_one_rank_has_is_not_enough(group: Group) -> None:
    """Pages, record and seal are on the leader; the other rank's seal comes late."""
    caller = await group.stream()
    await group.granted(1)
    for each in group.ranks:
        each.land(ASKED)
    at = group.sender.grants[1].slot * SLOT_BYTES + SEAL_OFFSET
    view = group.follower.slots.view
    seal, view[at : at + 24] = bytes(view[at : at + 24]), bytes(24)
    for _ in range(5):
        await group.turn()
    assert [each.phase(1) for each in group.ranks] == [Phase.TRANSFERRING] * RANKS
    assert group.leader.work.roster.get(RoomId(1)).sealed
    view[at : at + 24] = seal
    await group.settle()
    assert caller.tokens == toy.answer(ASKED)


async def test_a_leader_whose_ranks_are_behind_hears_of_a_command_at_once(group: Group) -> None:
    caller = await group.stream()
    await group.granted(1)
    group.leader.land(ASKED)
    await group.turn()
    assert (await group.turn())[0] is Lap.BEHIND
    turning = [
        asyncio.ensure_future(
            run_turns(each.work, each.group, each.clock, each.progress, NoArrivals(), behind_s=1_000)
        )
        for each in group.ranks
    ]
    await asyncio.sleep(0.1)
    cause = cause_to_wire(Cause(Reason.CANCELLED, "no longer wanted"))
    group.leader.mailbox.put(group_pb2.Command(cancel=inference_pb2.CancelRequest(room=1, cause=cause)))
    async with asyncio.timeout(PATIENCE_S):
        assert await caller.outcome() == "cancelled"
    for each in turning:
        each.cancel()
    await asyncio.gather(*turning, return_exceptions=True)


async def test_every_rank_tells_where_its_memory_is_now_when_it_was_taken_back(group: Group) -> None:
    """All ranks do so in the turn of the revocation, and the next connect tells the sender."""
    before = group.exposed()
    assert group.told() == [before] * RANKS
    caller = await group.stream()
    await group.granted(1)
    await _cancel(group, 1)
    await group.turns_until(lambda: caller.task.done())
    for each in group.ranks:
        each.clock.advance(DEADLINE_MS)
    await group.settle()
    after = group.exposed()
    assert not set(before) & set(after)
    assert group.told() == [after] * RANKS
    assert [each.work.gather_payload() for each in group.ranks] == [None] * RANKS, "once"
    again = await group.stream(toy.request("2", PROMPT, max_tokens=1))
    await group.granted(2)
    assert group.connected() == [before, after]
    for each in group.ranks:
        each.land(toy.request("2", PROMPT, max_tokens=1))
    await group.settle()
    assert await again.outcome() == ""


@pytest.mark.parametrize("rank", range(RANKS))
async def test_failure_is_agreed_what_one_rank_knows_ends_the_room_on_all(group: Group, rank: int) -> None:
    caller = await group.stream()
    await group.granted(1)
    cause = Cause(Reason.RECORD_CORRUPT, "decode: this rank alone knows")
    group.ranks[rank].work.roster.note(RoomId(1), Failed(cause))
    await group.turn()
    assert [each.phase(1) for each in group.ranks] == [Phase.FAILED] * RANKS
    assert await caller.outcome() == "record_corrupt"
    group.sender.quiet.set()
    await group.settle()


async def test_a_rank_whose_wish_the_others_do_not_share_says_so_once_and_why(group: Group) -> None:
    caller = await group.stream()
    await group.granted(1)
    group.follower.land(ASKED)
    for _ in range(5):
        await group.turn()
    assert wishes(group) == [
        [],
        [f"to go on from {phase}; another rank does not yet" for phase in ("bootstrapping", "transferring")],
    ]
    cause = Cause(Reason.RECORD_CORRUPT, "decode: this rank alone knows")
    group.leader.work.roster.note(RoomId(1), Failed(cause))
    await group.turn()
    assert wishes(group)[0] == [f"to end it while transferring: record_corrupt: {cause.text}"]
    assert await caller.outcome() == "record_corrupt"
    group.sender.quiet.set()
    await group.settle()


def wishes(group: Group) -> list[list[str]]:
    """Return the votes that each rank reported, by rank."""
    told = [
        [rooms_pb2.RoomEvent.FromString(report.event) for report in each.work.ports.reporter.pending]
        for each in group.ranks
    ]
    return [[event.detail for event in each if event.name == "voted"] for each in told]


async def test_every_rank_hears_that_the_worker_drains_and_all_leave_in_one_turn(group: Group) -> None:
    caller = await group.stream()
    await group.granted(1)
    group.leader.mailbox.put(group_pb2.Command(drain=True))
    assert Lap.LAST not in await group.turn()
    assert [each.work.draining for each in group.ranks] == [True, True]
    for each in group.ranks:
        each.land(ASKED)
    await group.settle()
    assert caller.tokens == toy.answer(ASKED)
    assert await group.turn() == [Lap.LAST] * RANKS


async def test_same_turns_a_rank_that_has_something_to_tell_alone_breaks_the_group(group: Group) -> None:
    """The group does not hang when one rank gathers and the other makes another call."""
    group.follower.work._endpoint_due = True
    results = await asyncio.wait_for(
        asyncio.gather(*(_turns(each, 2) for each in group.ranks), return_exceptions=True), 20
    )
    assert [type(each) for each in results] == [GroupBroken] * RANKS
    assert all("gather" in str(each) for each in results)


async def _turns(bench: DecodeBench, count: int) -> None:
    for _ in range(count):
        await bench.turn()


async def test_a_worker_that_breaks_off_tells_who_waits_with_the_first_cause(group: Group) -> None:
    first = await group.stream()
    other = toy.request("2", PROMPT, max_tokens=4)
    second = await group.stream(other)
    early = Cause(Reason.RECORD_CORRUPT, "decode: seen before")
    group.leader.work.roster.note(RoomId(2), Failed(early))
    group.leader.work.break_off(Cause(Reason.GROUP_BROKEN, "decode worker d: rank 1 died"))
    assert await first.outcome() == "group_broken"
    assert await second.outcome() == "record_corrupt"
    group.sender.quiet.set()
    for room in (1, 2):
        await _cancel(group, room)
    await group.settle()


async def test_a_turn_that_breaks_tells_every_room_that_it_ended_why_and_none_twice(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rooms are settled before the first caller is told, so a room's phase does not show which were
    told."""
    rooms = (1, 2, 3)
    callers = [await group.stream(toy.request(f"{room}", PROMPT, max_tokens=4)) for room in rooms]
    work: Any = group.leader.work
    replies = [work.roster.get(RoomId(room)).replies for room in rooms]
    receiving = group.leader.receiving
    perform = receiving.perform

    def breaks(room: DecodeRoom, effect: Any, now_ms: int) -> None:
        if room.id == 2:
            raise LocalBug("a bug in what is done about room 2")
        perform(room, effect, now_ms)

    monkeypatch.setattr(receiving, "perform", breaks)
    for room in rooms:
        work.roster.note(RoomId(room), Failed(Cause(Reason.RECORD_CORRUPT, "decode: seen before")))
    with pytest.raises(LocalBug, match="room 2"):
        await group.turn()
    group.leader.work.break_off(Cause(Reason.DECODE_LOST, "decode worker d ends: a bug"))
    assert [await caller.outcome() for caller in callers] == ["record_corrupt"] * 3
    assert all(each.empty() for each in replies), "once"


async def _cancel(group: Group, room: int) -> None:
    cause = cause_to_wire(Cause(Reason.CANCELLED, "no longer wanted"))
    command = group_pb2.Command(cancel=inference_pb2.CancelRequest(room=room, cause=cause))
    group.leader.mailbox.put(command)
    await group.turn()
