"""Tests that all rooms of one worker share one stream, and that each gets its own messages only."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from baton.bootstrap import worker_streams
from baton.bootstrap.worker_streams import WorkerStream, WorkerStreams
from baton.ids import Incarnation, Opener, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.worker_facts import StackFacts, WorkerFacts
from baton.rooms.worker_load import WorkerLoad
from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc, rooms_pb2
from baton.wire.channel import Channels
from baton.wire.errors import RemoteError
from baton.worker.shared_stream import rooms_reply
from tests.wire.servers import serving, until

ACCEPTED = inference_pb2.RunRoomReply(accepted=inference_pb2.Accepted())
OVER = inference_pb2.RunRoomReply(outcome=rooms_pb2.Outcome())
OPENER = Opener(77)


@dataclass
class Ear:
    heard_all: list[str | None] = field(default_factory=list)
    error: RemoteError | None = None

    def on_reply(self, side: Side, reply: Any) -> None:
        self.heard_all.append(reply.WhichOneof("what"))

    def on_broken(self, side: Side, error: RemoteError) -> None:
        self.error = error


class DeafEar(Ear):
    def on_reply(self, side: Side, reply: Any) -> None:
        raise RuntimeError("a bug of ours")


class ScriptedPrefill(inference_pb2_grpc.PrefillServiceServicer):
    """Says what the test lets it say."""

    def __init__(self) -> None:
        self.streams = self.requests = self.ended = 0
        self.opened: list[int] = []
        self.cancelled: list[int] = []
        self.causes: set[str] = set()
        self.says: asyncio.Queue[Sequence[tuple[int, Any]] | None] = asyncio.Queue()

    async def RunRooms(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1

        async def read() -> None:
            async for request in request_iterator:
                self.requests += 1
                self.opened += [each.room for each in request.open]
                self.cancelled += [each.room for each in request.cancel]
                self.causes |= {each.cause.text for each in request.cancel}

        reading = asyncio.create_task(read())
        try:
            while (lines := await self.says.get()) is not None:
                refuses = any(isinstance(reply, inference_pb2.Refused) for _, reply in lines)
                load = rooms_pb2.WorkerLoad(number=1) if refuses else None
                yield rooms_reply(inference_pb2.RunRoomsReply(load=load), lines)  # type: ignore[arg-type]
        finally:
            reading.cancel()
            self.ended += 1

    async def RunRoom(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        raise NotImplementedError
        yield


@dataclass
class At:
    worker: ScriptedPrefill
    links: WorkerStreams
    facts: WorkerFacts
    absent: list[tuple[int, Side]]
    loads: list[tuple[int, WorkerLoad]]
    ears: dict[int, Ear] = field(default_factory=dict)

    @property
    def link(self) -> WorkerStream:
        return self.links.to(self.facts)

    def open(self, *rooms: int, ear: Ear | None = None) -> None:
        for room in rooms:
            self.ears[room] = ear or Ear()
            self.link.open(inference_pb2.RunRoomRequest(room=room), self.ears[room])

    def over(self, *rooms: int) -> None:
        for room in rooms:
            self.link.cancel(RoomId(room), Cause(Reason.CANCELLED, "as it is told"))

    def say(self, *lines: tuple[int, Any]) -> None:
        self.worker.says.put_nowait(lines)

    async def hears(self, room: int, *replies: str) -> None:
        await until(lambda: self.ears[room].heard_all == list(replies))


@pytest.fixture
async def at() -> AsyncIterator[At]:
    worker, channels = ScriptedPrefill(), Channels()

    def add(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server)

    async with serving(add) as address:
        facts = WorkerFacts(
            "prefill-0", Side.PREFILL, Incarnation(7), address, "model", StackFacts(), 1_000, 100
        )
        absent: list[tuple[int, Side]] = []
        loads: list[tuple[int, WorkerLoad]] = []
        made = At(
            worker,
            WorkerStreams(
                channels, lambda *told: absent.append(told), lambda *told: loads.append(told), OPENER
            ),
            facts,
            absent,
            loads,
        )
        try:
            yield made
        finally:
            made.links.close()
            await channels.close()


async def test_many_rooms_are_asked_for_in_one_message_and_answered_in_one(at: At) -> None:
    rooms = range(1, 65)
    at.open(*rooms)
    await until(lambda: len(at.worker.opened) == len(rooms))
    assert (at.worker.streams, at.worker.requests) == (1, 1)
    at.say(*((room, ACCEPTED) for room in rooms))
    for room in rooms:
        await at.hears(room, "accepted")
    at.open(100)
    await until(lambda: at.worker.opened[-1] == 100)
    assert (at.worker.streams, at.worker.requests) == (1, 2), "the stream is kept"


async def test_long_requests_go_one_by_one_and_none_is_over_before_it_is_opened(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_streams, "MESSAGE_BYTES", 1)
    at.open(1, 2, 3)
    at.over(1, 2, 3)
    await until(lambda: at.worker.cancelled == [1, 2, 3])
    assert at.worker.opened == [1, 2, 3]
    assert at.worker.requests == 6


async def test_failure_adds_no_load_what_ends_many_rooms_is_one_message_without_a_call_of_its_own(
    at: At,
) -> None:
    rooms = range(1, 301)
    at.open(*rooms)
    await until(lambda: len(at.worker.opened) == len(rooms))
    at.over(*rooms)
    at.over(*rooms)
    await until(lambda: len(at.worker.cancelled) == len(rooms))
    assert (at.worker.streams, at.worker.requests) == (1, 2)
    assert at.worker.causes == {"as it is told"}


async def test_terminal_reaches_peer_a_room_that_was_not_opened_here_is_cancelled_too(at: At) -> None:
    at.over(5)
    await until(lambda: at.worker.cancelled == [5])
    at.say((5, None))
    await until(lambda: at.absent == [(5, Side.PREFILL)])


async def test_terminal_reaches_peer_what_is_over_is_told_again_on_the_next_stream_until_it_is_known(
    at: At,
) -> None:
    at.open(1)
    at.over(1, 2, 3)
    await until(lambda: at.worker.cancelled == [1, 2, 3])
    at.links.forget(at.facts.incarnation, RoomId(2))
    at.worker.says.put_nowait(None)
    await until(lambda: at.worker.cancelled == [1, 2, 3, 1, 3])
    assert (at.worker.streams, at.links.over()) == (2, 2)
    for room in (1, 3):
        at.links.forget(at.facts.incarnation, RoomId(room))
    at.worker.says.put_nowait(None)
    await until(lambda: at.link.task is None)
    assert (at.worker.streams, at.links.over(), at.links.rooms()) == (2, 0, 0), "there is nothing to be told"


async def test_a_worker_that_is_lost_is_told_nothing_any_more(at: At) -> None:
    at.over(1)
    await until(lambda: at.worker.cancelled == [1])
    at.links.drop(at.facts.incarnation)
    await until(lambda: at.worker.ended == 1)
    assert (at.links.over(), at.worker.streams) == (0, 1)


async def test_a_request_too_long_for_any_message_fails_alone(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_streams, "OPEN_BYTES_MAX", 8)
    at.ears[1] = Ear()
    at.link.open(inference_pb2.RunRoomRequest(room=1, incarnation=7), at.ears[1])
    assert at.ears[1].error is None, "nobody is told while he asks"
    await until(lambda: at.ears[1].error is not None)
    assert str(at.ears[1].error) == "the request takes 18 bytes, at most 8 are taken"
    assert at.worker.streams == 0


async def test_nothing_is_heard_behind_an_outcome_or_a_refusal(at: At) -> None:
    at.open(1, 2, 3)
    refused = inference_pb2.Refused(code=8, kind="RosterFull", text="all places are taken")
    at.say((1, ACCEPTED), (2, refused), (1, OVER), (1, ACCEPTED), (3, ACCEPTED))
    await at.hears(3, "accepted")
    assert at.ears[1].heard_all == ["accepted", "outcome"]
    error = at.ears[2].error
    assert error is not None
    assert (error.code, error.kind, error.unreachable) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "RosterFull",
        False,
    )
    assert at.links.rooms() == 1


async def test_a_refusal_comes_behind_the_load_that_its_message_has(at: At) -> None:
    """The load explains the refusal. It must not count as a later report of the worker."""
    at.open(1)
    known: list[int] = []
    at.ears[1].on_broken = lambda *_: known.append(len(at.loads))  # type: ignore[method-assign]
    refused = inference_pb2.Refused(code=8, kind="RosterFull", text="all places are taken")
    at.say((1, refused))
    await until(lambda: known == [1])


async def test_malformed_is_contained_what_one_room_cannot_take_does_not_reach_the_others(at: At) -> None:
    at.open(1, ear=DeafEar())
    at.open(2)
    at.say((1, ACCEPTED), (2, ACCEPTED))
    await at.hears(2, "accepted")
    assert at.worker.ended == 0


async def test_room_ends_a_stream_that_ends_is_told_to_every_room_on_it_and_the_next_has_a_new_one(
    at: At,
) -> None:
    at.open(1, 2)
    await until(lambda: len(at.worker.opened) == 2)
    at.worker.says.put_nowait(None)
    await until(lambda: all(at.ears[room].error is not None for room in (1, 2)))
    at.open(3)
    at.say((3, ACCEPTED))
    await at.hears(3, "accepted")
    assert at.worker.streams == 2
    assert at.links.rooms() == 1


async def test_terminal_reaches_peer_the_stream_of_a_worker_that_is_lost_ends_at_both_ends(at: At) -> None:
    at.open(1)
    await until(lambda: at.worker.opened == [1])
    at.links.drop(at.facts.incarnation)
    assert at.ears[1].error is not None
    await until(lambda: at.worker.ended == 1)
    assert at.links.rooms() == 0


async def test_an_address_where_nobody_listens_is_unreachable(at: At) -> None:
    nobody = WorkerFacts(
        "gone", Side.DECODE, Incarnation(8), "127.0.0.1:1", "model", StackFacts(), 1_000, 100
    )
    ear = Ear()
    at.links.to(nobody).open(inference_pb2.StreamRoomRequest(room=1), ear)
    await until(lambda: ear.error is not None)
    assert ear.error is not None
    assert ear.error.unreachable


async def test_authorised_writer_a_worker_lets_go_of_no_room_of_anothers(at: At) -> None:
    """Room ids are counted up, so they can be guessed. A worker may release only rooms that it was told are
    over."""
    at.open(1)
    at.over(5)
    await until(lambda: at.worker.cancelled == [5])
    at.say((1, None), (2, None), (5, None), (6, None))
    await until(lambda: bool(at.absent))
    assert at.absent == [(5, Side.PREFILL)]


async def test_what_a_prefill_worker_says_of_its_load_is_nothing(at: At) -> None:
    at.open(1)
    at.say((1, OVER))
    await at.hears(1, "outcome")
    assert at.loads == []
