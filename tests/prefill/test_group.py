"""Tests that the ranks of a prefill worker act in step, whichever of them an event happens on."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from baton.handover.turn import Lap
from baton.ids import NO_OPENER, Incarnation, RoomId
from baton.prefill.prefill_room import PrefillRoom
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.errors import Cause, NotConnected, Reason, WorkerRefused
from baton.rooms.evidence import Failed
from baton.rooms.phases import Phase
from baton.testing.memory_fabric import MemoryFabric
from baton.transfer.transfer_protocol import Endpoint, TransferError
from baton.wire.baton.v1 import group_pb2, inference_pb2, rooms_pb2
from baton.wire.conversions import cause_to_wire, request_to_wire
from tests.prefill import toy
from tests.prefill.bench import DEADLINE_MS, PrefillBench, Receiver, connect_request
from tests.support.loopback import Loopback

PROMPT = tuple(range(100, 110))
GRANTED = (9, 2, 3)
RANKS = 2


class Group:
    """Two ranks on each side that hold the toy model's only head. Each sender sends to the receiver with its
    number, and the first one writes both records."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.receivers = [Receiver(self.fabric), Receiver(self.fabric, Incarnation(1_022))]
        self.ranks = [
            PrefillBench(self.fabric, group=group, layouts=[toy.LAYOUT] * RANKS)
            for group in Loopback(RANKS).groups()
        ]
        self.leader, self.follower = self.ranks

    def request(self) -> inference_pb2.ConnectRequest:
        return connect_request(*self.receivers)

    async def turn(self) -> list[Lap]:
        return await asyncio.gather(*(each.turn() for each in self.ranks))

    async def while_turning(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of the leader's caller `work`, and take turns until it is there."""
        task = asyncio.ensure_future(work)
        for _ in range(500):
            await asyncio.sleep(0)
            if task.done():
                break
            await self.turn()
            await self.steps()
        return await task

    async def steps(self) -> None:
        for each in self.ranks:
            if not each.step_thread.free:
                await each.step_end()

    async def ask(self, *commands: group_pb2.Command) -> list[Exception | None]:
        """Put commands into one turn, and return the error of each, or None."""
        asked = [asyncio.ensure_future(self.leader.mailbox.submit(each)) for each in commands]
        await asyncio.sleep(0)
        await self.turn()
        return [_problem(each) for each in await asyncio.gather(*asked, return_exceptions=True)]

    async def connect(self) -> None:
        assert await self.ask(group_pb2.Command(connect=self.request())) == [None]

    async def run(self) -> "asyncio.Future[str]":
        """Open and grant room 1, and return the future of its outcome."""
        heard: list[inference_pb2.RunRoomReply] = []

        async def listen() -> str:
            command = group_pb2.Command(run=_run())
            async with self.leader.work.callers.calling(RoomId(1), NO_OPENER, command, 4) as replies:
                while not (heard and heard[-1].HasField("outcome")):
                    heard.append(await replies.get())
            outcome = heard[-1].outcome
            return outcome.cause.reason if outcome.HasField("cause") else ""

        told = asyncio.ensure_future(listen())
        await asyncio.sleep(0)
        await self.turn()
        return told

    async def grant(self) -> None:
        grant = inference_pb2.GrantRequest(
            room=1,
            receiver=22,
            generation=5,
            pages=[inference_pb2.PageTable(pages=GRANTED)],
            slot=0,
            exposure=22,
        )
        assert await self.ask(group_pb2.Command(grant=grant)) == [None]

    async def writing(self) -> "asyncio.Future[str]":
        """Compute room 1 with its writes stalled, and return the future of its outcome."""
        await self.connect()
        told = await self.run()
        await self.grant()
        for receiver in self.receivers:
            self.fabric.stall(receiver.endpoint.incarnation)
        for _ in range(10):
            await self.turn()
            await self.steps()
        return told

    def rooms(self) -> list[PrefillRoom]:
        return [each.work.roster.get(RoomId(1)) for each in self.ranks]

    def phases(self) -> list[Phase]:
        return [room.phase for room in self.rooms()]

    def sealed(self) -> list[bool]:
        return [each.record(0, 1, 5) is not None for each in self.receivers]

    async def settle(self) -> None:
        for _ in range(500):
            if not any(len(each.work.roster) for each in self.ranks):
                break
            await self.steps()
            await self.turn()
        for each in self.ranks:
            each.assert_empty()


def _run() -> inference_pb2.RunRoomRequest:
    return inference_pb2.RunRoomRequest(
        room=1,
        incarnation=11,
        decode=rooms_pb2.Peer(name="decode-0", incarnation=22, address="127.0.0.1:1"),
        request=request_to_wire(toy.request("1", PROMPT)),
    )


def _problem(answer: BaseException | None) -> Exception | None:
    assert answer is None or isinstance(answer, Exception)
    return answer


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    made = Group()
    yield made
    for each in made.ranks:
        each.close()


def refuses(bench: PrefillBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every connection of this rank fail."""

    def connect(peer: Endpoint) -> None:
        raise TransferError(f"{peer.agent} cannot be reached")

    monkeypatch.setattr(bench.transfer, "connect", connect)


async def test_a_room_leaves_both_ranks_and_is_sealed_in_both_of_the_receiver(group: Group) -> None:
    await group.connect()
    told = await group.run()
    await group.grant()
    await group.settle()
    assert await told == ""
    assert group.sealed() == [True, True]
    for bench, receiver in zip(group.ranks, group.receivers, strict=True):
        whole = toy.read(bench.engine.memory.address, 3 * toy.GROUP.page_bytes)
        assert b"".join(map(receiver.page, GRANTED)) == whole
        assert bench.gauge("baton_kv_transfer_bytes_total") == 3 * toy.GROUP.page_bytes


async def test_a_connection_is_told_as_made_when_every_rank_has_made_it(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuses(group.follower, patch)
        (problem,) = await group.ask(group_pb2.Command(connect=group.request()))
        assert isinstance(problem, NotConnected)
        assert "not every rank of this prefill worker" in str(problem)
    await group.connect()
    with monkeypatch.context() as patch:
        refuses(group.leader, patch)
        (problem,) = await group.ask(group_pb2.Command(connect=group.request()))
        assert isinstance(problem, NotConnected)
        assert "cannot be reached" in str(problem), "its own problem says more"


async def test_no_connection_is_told_of_before_the_other_ranks_were_heard(group: Group) -> None:
    """The leader has carried out the command, and no rank has agreed yet."""
    made, unmade = (
        asyncio.ensure_future(group.leader.mailbox.submit(group_pb2.Command(connect=group.request())))
        for _ in range(2)
    )
    await asyncio.sleep(0)
    work = group.leader.work
    work.apply(work.take_commands())
    assert work.connects() == 2
    await asyncio.sleep(0)
    assert not made.done()
    assert not unmade.done()
    work.on_agreement(1)
    await made
    with pytest.raises(NotConnected, match="not every rank"):
        await unmade


async def test_of_several_connections_those_before_the_first_that_failed_are_told_as_made(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One vote has the number of connections. Those behind the first failure are requested again, and
    found."""
    good, wrong = group.request(), group.request()
    wrong.schema = "record-0"
    first, second, third = await group.ask(*(group_pb2.Command(connect=each) for each in (good, wrong, good)))
    assert first is None
    assert isinstance(second, WorkerRefused), "refused for good, by name"
    assert isinstance(third, NotConnected)
    twice = [group_pb2.Command(connect=good)] * 2
    assert await group.ask(*twice) == [None, None]
    once = [TransferError("it cannot be reached this time")]
    connect = group.follower.transfer.connect

    def reluctant(peer: Endpoint) -> None:
        if once:
            raise once.pop()
        connect(peer)

    monkeypatch.setattr(group.follower.transfer, "connect", reluctant)
    answers = await group.ask(*twice)
    assert [type(each) for each in answers] == [NotConnected] * 2, "the second is not taken for the first"
    assert await group.ask(*twice) == [None, None]


async def test_what_is_asked_beside_a_connection_gets_its_own_answer(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    await group.connect()
    refuses(group.follower, monkeypatch)
    cause = cause_to_wire(Cause(Reason.CANCELLED, "no longer wanted"))
    cancel = group_pb2.Command(cancel=inference_pb2.CancelRequest(room=77, cause=cause))
    grant = group_pb2.Command(grant=inference_pb2.GrantRequest(room=78))
    answers = await group.ask(cancel, group_pb2.Command(connect=group.request()), grant, cancel)
    assert [type(each).__name__ for each in answers] == [
        "NoneType",
        "NotConnected",
        "UnknownRoom",
        "NoneType",
    ]


async def test_a_grant_whose_way_broke_on_one_rank_ends_the_room_on_every_rank(group: Group) -> None:
    await group.connect()
    told = await group.run()
    group.follower.transfer.disconnect(group.receivers[1].endpoint.incarnation)
    await group.grant()
    assert await group.while_turning(told_of(told)) == "connect_failed"
    await group.settle()
    assert group.sealed() == [False, False]


async def told_of(told: "asyncio.Future[str]") -> str:
    return await told


async def test_seal_last_nothing_is_sealed_while_one_rank_still_writes(group: Group) -> None:
    await group.connect()
    told = await group.run()
    await group.grant()
    peer = group.follower.transfer.endpoint().incarnation
    group.fabric.stall(peer)
    for _ in range(60):
        await group.turn()
        await group.steps()
    assert group.phases() == [Phase.TRANSFERRING] * RANKS
    assert group.rooms()[0].written
    assert group.sealed() == [False, False]
    group.fabric.resume(peer)
    await group.settle()
    assert await told == ""
    assert group.sealed() == [True, True]


async def test_one_rank_that_writes_still_does_not_let_the_others_run_out_of_time(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with nothing left to write does not count as late."""
    monkeypatch.setattr("baton.prefill.room_transfer.POSTS_A_TURN_MAX", 1)
    await group.connect()
    told = await group.run()
    await group.grant()
    peer = group.follower.transfer.endpoint().incarnation
    group.fabric.stall(peer)
    for _ in range(10):
        await group.turn()
        await group.steps()
    assert [room.written for room in group.rooms()] == [True, False]
    for _ in range(2):
        for each in group.ranks:
            each.clock.advance(DEADLINE_MS * 6 // 10)
        await group.turn()
        group.fabric.resume(peer)
        await group.turn()
        group.fabric.stall(peer)
    assert group.rooms()[0].phase_ms[Phase.TRANSFERRING] > DEADLINE_MS
    group.fabric.resume(peer)
    await group.settle()
    assert await told == ""


PHASES = [Phase.BOOTSTRAPPING, Phase.WAITING_FOR_INPUT, Phase.TRANSFERRING, Phase.SEALING]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("phase", PHASES, ids=[phase.value for phase in PHASES])
async def test_failure_is_agreed_what_one_rank_knows_ends_the_room_on_all(
    group: Group, rank: int, phase: Phase
) -> None:
    await group.connect()
    told = await group.run()
    if phase is not Phase.BOOTSTRAPPING:
        await group.grant()
    if phase is Phase.SEALING:
        group.fabric.stall(group.receivers[0].endpoint.incarnation)
        group.fabric.resume(group.receivers[0].endpoint.incarnation)
    for _ in range(60):
        if group.phases() == [phase] * RANKS:
            break
        await group.turn()
        await group.steps()
    assert group.phases() == [phase] * RANKS
    cause = Cause(Reason.ENGINE_FAILED, "prefill: this rank alone knows")
    group.ranks[rank].work.roster.note(RoomId(1), Failed(cause))
    await group.turn()
    assert group.phases() == [Phase.FAILED] * RANKS
    assert await told == "engine_failed"
    await group.settle()


async def test_every_rank_hears_that_the_worker_drains_and_all_leave_in_one_turn(group: Group) -> None:
    await group.connect()
    told = await group.run()
    group.leader.mailbox.put(group_pb2.Command(drain=True))
    assert Lap.LAST not in await group.turn()
    assert [each.work.draining for each in group.ranks] == [True, True]
    await group.grant()
    await group.settle()
    assert await told == ""
    laps = await group.turn()
    assert laps == [Lap.LAST, Lap.LAST]


async def test_the_ranks_of_a_prefill_worker_have_nothing_to_tell(group: Group) -> None:
    for each in group.ranks:
        assert each.work.gather_payload() is None
        with pytest.raises(AssertionError, match="tell each other nothing"):
            each.work.on_gathered([])
    assert [isinstance(each.work, PrefillWork) for each in group.ranks] == [True, True]


async def test_a_worker_that_breaks_off_tells_who_waits_and_acknowledges_no_close(group: Group) -> None:
    """The first cause stays the cause, and the worker's end is no proof that writes ended
    (`ack-is-proof`)."""
    await group.connect()
    told = await group.run()
    closed = group.leader.work.quiet(RoomId(1))
    group.leader.work.break_off(Cause(Reason.GROUP_BROKEN, "prefill worker p: rank 1 died"))
    assert await told == "group_broken"
    assert not closed.done()
    closed.cancel()
    for each in group.ranks:
        each.work.roster.note(RoomId(1), Failed(Cause(Reason.CANCELLED, "so that nothing is left")))
    await group.settle()
