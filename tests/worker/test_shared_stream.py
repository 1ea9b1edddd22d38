"""Tests that each of many rooms on a shared stream gets the messages that its own call would have brought."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.ids import Incarnation, Opener, RoomId
from baton.rooms.errors import Cause, NotOrphaned, Reason, Refusal, RoomExists
from baton.rooms.request import SCORES_MAX, Score
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import (
    SCORE_MESSAGES_MAX,
    SCORES_A_MESSAGE,
    cause_to_wire,
    outcome_to_wire,
    scores_to_wire,
)
from baton.wire.errors import refusal_from_wire
from baton.worker import shared_stream
from baton.worker.callers import Callers
from baton.worker.mailbox import Mailbox
from baton.worker.shared_stream import Rest, SharedStream, ends_some, rooms_reply

MOST = 4
MINE = Incarnation(7)
ACCEPTED = inference_pb2.RunRoomReply(accepted=inference_pb2.Accepted())
FIRST = inference_pb2.RunRoomReply(first_token=inference_pb2.FirstToken())
OVER = inference_pb2.RunRoomReply(outcome=outcome_to_wire(None))


class Bench:
    """A worker's end of one stream; the test is its turn, and its caller."""

    def __init__(self) -> None:
        self.box = Mailbox()
        self.here: set[tuple[RoomId, Opener]] = set()
        self.callers: Callers[inference_pb2.RunRoomReply] = Callers(self.box, lambda *room: room in self.here)
        self.opener = Opener(77)
        self.cancels: list[tuple[int, int]] = []
        """Rooms that were cancelled, each with the opener that cancelled it."""
        self.orphans: list[tuple[int, int]] = []
        """Rooms whose stream broke, each with its opener."""
        self.requests: asyncio.Queue[inference_pb2.RunRoomsRequest | Exception | None] = asyncio.Queue()
        self.most = MOST
        """Most replies of a room."""
        self.messages: list[list[tuple[int, str | None]]] = []
        self.scores: list[int] = []
        """Scores in each message."""
        self.absent: list[int] = []
        self.refused: dict[int, str] = {}
        self.voices: dict[int, Any] = {}
        self.rest: Rest | None = None
        self.read = asyncio.Event()
        """Clear: the caller takes nothing."""
        self.read.set()

    def ask(self, *rooms: int, over: tuple[int, ...] = (), incarnation: Incarnation = MINE) -> None:
        opened = [inference_pb2.RunRoomRequest(room=room, opener=self.opener) for room in rooms]
        cause = cause_to_wire(Cause(Reason.CANCELLED, "as it is told"))
        cancel = [
            inference_pb2.CancelRequest(room=room, incarnation=incarnation, cause=cause, opener=self.opener)
            for room in over
        ]
        self.requests.put_nowait(inference_pb2.RunRoomsRequest(open=opened, cancel=cancel))

    def adopt(self, room: int, *, incarnation: Incarnation = MINE) -> None:
        adopted = inference_pb2.AdoptRequest(room=room, incarnation=incarnation, opener=self.opener)
        self.requests.put_nowait(inference_pb2.RunRoomsRequest(adopt=[adopted]))

    def turn(self, *, error: Exception | None = None) -> list[tuple[str | None, int]]:
        """Apply what was asked for; every opened room accepts."""
        taken: list[tuple[str | None, int]] = []
        for command in group_pb2.Commands.FromString(self.box.take()).commands:
            what = command.WhichOneof("what")
            asked = getattr(command, str(what))
            room = RoomId(asked.room)
            if what in ("run", "adopt") and error is None and (voice := self.callers.take(room)) is not None:
                voice.put_nowait(ACCEPTED)
                self.voices[room] = voice
                self.here.add((room, Opener(asked.opener)))
            if what == "orphan":
                self.orphans.append((room, asked.opener))
            if what == "cancel":
                self.cancels.append((room, command.cancel.opener))
            self.box.answer(error)
            taken.append((what, int(room)))
        return taken

    async def serve(self) -> None:
        shared = SharedStream(self.callers, self._judge, MINE, self._rest)
        async with shared.reading(self._asked()):
            async for lines in shared.lines():
                said = rooms_reply(inference_pb2.RunRoomsReply(), lines)
                self.messages.append([(line.room, line.reply.WhichOneof("what")) for line in said.lines])
                self.scores.append(sum(len(line.reply.scores.logprobs) for line in said.lines))
                self.absent += [line.room for line in said.lines if line.absent]
                self.refused |= {
                    line.room: refusal_from_wire(line.refused).kind
                    for line in said.lines
                    if line.HasField("refused")
                }
                await self.read.wait()

    def _judge(self, request: inference_pb2.RunRoomRequest) -> tuple[group_pb2.Command, int]:
        if request.room == 13:
            raise Refusal("no such luck")
        return group_pb2.Command(run=request), self.most

    async def _rest(self, request: inference_pb2.RunRoomsRequest) -> None:
        if self.rest is not None:
            await self.rest(request)

    async def _asked(self) -> AsyncIterator[inference_pb2.RunRoomsRequest]:
        while (request := await self.requests.get()) is not None:
            if isinstance(request, Exception):
                raise request
            yield request

    @property
    def at_rest(self) -> bool:
        return len(self.callers) == 0 and not self.box.waiting and not self.box.unanswered


async def steps() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def stream() -> AsyncIterator[tuple[Bench, "asyncio.Task[None]"]]:
    at = Bench()
    task = asyncio.create_task(at.serve())
    await steps()
    try:
        yield at, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_rooms_say_in_one_turn_leaves_in_one_message() -> None:
    async with stream() as (at, _):
        at.ask(1, 2, 3)
        await steps()
        assert at.turn() == [("run", 1), ("run", 2), ("run", 3)]
        await steps()
        for room in (1, 2, 3):
            at.voices[room].put_nowait(FIRST)
        await steps()
        assert at.messages == [
            [(room, "accepted") for room in (1, 2, 3)],
            [(room, "first_token") for room in (1, 2, 3)],
        ]


async def test_a_caller_that_takes_nothing_gets_all_later_and_in_order_and_no_more_than_a_room_can_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_stream, "LINES_MAX", 2)
    async with stream() as (at, _):
        at.ask(1)
        await steps()
        at.turn()
        await steps()
        at.read.clear()
        for reply in (FIRST, FIRST, OVER):
            at.voices[1].put_nowait(reply)
        with pytest.raises(asyncio.QueueFull):
            at.voices[1].put_nowait(FIRST)
        await steps()
        at.read.set()
        await steps()
        assert at.messages[1:] == [[(1, "first_token"), (1, "first_token")], [(1, "outcome")]]


async def test_what_is_long_leaves_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_stream, "MESSAGE_BYTES", FIRST.ByteSize() + 1)
    async with stream() as (at, _):
        at.ask(1)
        await steps()
        at.turn()
        await steps()
        at.read.clear()
        for reply in (FIRST, FIRST, OVER):
            at.voices[1].put_nowait(reply)
        await steps()
        at.read.set()
        await steps()
        assert at.messages[1:] == [[(1, "first_token"), (1, "first_token")], [(1, "outcome")]]


async def test_no_blocking_of_a_long_prompts_scores_a_message_has_few() -> None:
    """A message has only as many scores as its reader can take without delaying all others."""
    async with stream() as (at, _):
        at.most = SCORE_MESSAGES_MAX + 1
        at.ask(1)
        await steps()
        at.turn()
        await steps()
        for each in scores_to_wire([Score(-1.5, 3)] * SCORES_MAX):
            at.voices[1].put_nowait(inference_pb2.RunRoomReply(scores=each))
        await steps()
        assert sum(at.scores) == SCORES_MAX
        assert max(at.scores) <= 2 * SCORES_A_MESSAGE


async def test_a_refused_room_ends_alone() -> None:
    async with stream() as (at, _):
        at.ask(13, 1)
        await steps()
        assert at.turn() == [("run", 1)]
        at.ask(2)
        await steps()
        at.turn(error=RoomExists("it is here already"))
        await steps()
        assert at.refused == {13: "Refusal", 2: "RoomExists"}
        at.voices[1].put_nowait(OVER)
        await steps()
        assert at.messages[-1] == [(1, "outcome")]
        assert at.at_rest, "who was refused, or has ended, is not cancelled"


async def test_terminal_reaches_peer_rooms_are_cancelled_in_one_message_whoever_opened_them() -> None:
    async with stream() as (at, _):
        at.ask(1, 2)
        await steps()
        at.turn()
        await steps()
        at.ask(over=(1, 2, 9))
        await steps()
        assert at.absent == []
        assert at.turn() == [("cancel", 1), ("cancel", 2), ("cancel", 9)]
        await steps()
        assert at.absent == [9], "of those that are here, what they say is heard on"
        at.voices[1].put_nowait(OVER)
        await steps()
        assert at.messages[-1] == [(1, "outcome")]


async def test_cancel_remembered_a_room_that_is_opened_and_cancelled_at_once_is_opened_first() -> None:
    async with stream() as (at, _):
        at.ask(1, over=(1,))
        await steps()
        assert at.turn() == [("run", 1), ("cancel", 1)]
        await steps()
        assert at.absent == []


async def test_incarnation_a_cancel_that_was_meant_for_another_process_is_not_taken() -> None:
    """That this worker has no such room proves nothing about the other process's memory."""
    async with stream() as (at, _):
        at.ask(over=(9,), incarnation=Incarnation(8))
        await steps()
        assert at.turn() == []
        assert at.absent == []


@pytest.mark.parametrize("opened", [False, True])
async def test_orphan_ends_a_stream_that_ends_makes_orphans_of_the_rooms_on_it(opened: bool) -> None:
    async with stream() as (at, task):
        at.ask(1, 2)
        await steps()
        if opened:
            at.turn()
            at.voices[2].put_nowait(OVER)
            await steps()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        expected = [("orphan", 1)] if opened else [("run", 1), ("run", 2), ("orphan", 1), ("orphan", 2)]
        assert at.turn() == expected, "after the room, in this order"
        assert at.at_rest


async def test_malformed_is_contained_requests_that_make_no_sense_end_the_stream_with_their_error() -> None:
    async with stream() as (at, task):
        at.requests.put_nowait(Refusal("not a message"))
        with pytest.raises(Refusal):
            await task


async def test_a_stream_whose_requests_are_over_ends_with_its_last_room() -> None:
    async with stream() as (at, task):
        at.ask(1)
        at.requests.put_nowait(None)
        await steps()
        at.turn()
        await steps()
        assert not task.done()
        at.voices[1].put_nowait(OVER)
        await steps()
        assert task.done()
        assert at.messages[-1] == [(1, "outcome")]


async def test_room_unique_a_second_opening_of_a_room_takes_nothing_from_the_first() -> None:
    async with stream() as (at, _):
        at.ask(1)
        at.ask(1)
        await steps()
        assert at.turn() == [("run", 1)]
        at.voices[1].put_nowait(OVER)
        await steps()
        assert [line for message in at.messages for line in message] == [(1, "accepted"), (1, "outcome")]


async def test_opener_owns_a_room_of_another_opener_is_absent_for_this_one() -> None:
    async with stream() as (at, _):
        at.here.add((RoomId(1), Opener(88)))
        at.ask(2, over=(1,))
        await steps()
        at.turn()
        await steps()
        at.ask(over=(2,))
        await steps()
        at.turn()
        await steps()
        assert at.absent == [1], "the second one is here"


async def test_opener_owns_a_stream_that_ends_makes_orphans_in_its_openers_name() -> None:
    async with stream() as (at, task):
        at.ask(1)
        await steps()
        at.turn()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        at.turn()
        assert at.orphans == [(1, at.opener)]


async def test_adopt_first_wins_an_adopted_room_is_read_on_the_adopters_stream() -> None:
    async with stream() as (at, task):
        at.adopt(1)
        await steps()
        assert at.turn() == [("adopt", 1)]
        at.voices[1].put_nowait(FIRST)
        await steps()
        assert at.messages == [[(1, "accepted"), (1, "first_token")]]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        at.turn()
        assert at.orphans == [(1, at.opener)], "it may be adopted again"


async def test_adopt_first_wins_a_room_that_is_not_given_is_refused_and_not_ended() -> None:
    async with stream() as (at, task):
        at.adopt(1)
        await steps()
        at.turn(error=NotOrphaned("another bootstrap reads it"))
        await steps()
        assert at.refused == {1: "NotOrphaned"}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert at.turn() == [], "it is another bootstrap's room"


async def test_a_room_of_this_stream_or_of_another_process_is_not_adopted() -> None:
    async with stream() as (at, _):
        at.ask(1)
        await steps()
        at.turn()
        at.adopt(1)
        at.adopt(2, incarnation=Incarnation(8))
        await steps()
        assert at.turn() == []
        assert at.refused == {1: "RoomExists", 2: "WrongIncarnation"}


async def test_what_else_a_message_asks_for_enters_behind_the_rooms_that_it_opens() -> None:
    async with stream() as (at, _):

        async def ends(_: inference_pb2.RunRoomsRequest) -> None:
            await at.box.submit(group_pb2.Command(end_choice=inference_pb2.EndChoiceRequest(room=1)))

        at.rest = ends
        at.ask(1)
        await steps()
        assert [what for what, _ in at.turn()] == ["run", "end_choice"]


async def test_malformed_is_contained_what_a_message_asks_for_beside_rooms_ends_no_stream() -> None:
    async with stream() as (at, task):

        async def refuses(_: inference_pb2.RunRoomsRequest) -> None:
            raise Refusal("there is no such choice")

        at.rest = refuses
        at.ask(1)
        await steps()
        at.rest = None
        at.ask(2)
        await steps()
        assert at.turn() == [("run", 1), ("run", 2)]
        await steps()
        assert not task.done()
        assert [room for message in at.messages for room, _ in message] == [1, 2]


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        (ACCEPTED, False),
        (FIRST, False),
        (OVER, True),
        (inference_pb2.Refused(code=8), True),
        (None, False),
    ],
)
def test_the_worker_has_other_space_where_a_room_ended_or_was_refused(said: Any, ends: bool) -> None:
    assert ends_some([(RoomId(1), FIRST), (RoomId(2), said)]) is ends
