"""Tests of the callers of rooms: each gets all news of its room, and its end cancels the room."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from baton.ids import Opener, RoomId
from baton.rooms.errors import Refusal, RoomExists
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.worker.callers import Callers
from baton.worker.mailbox import Mailbox

ROOM, OPENER = RoomId(7), Opener(77)
RUN = group_pb2.Command(run=inference_pb2.RunRoomRequest(room=ROOM))


class Bench:
    def __init__(self) -> None:
        self.box = Mailbox()
        self.callers: Callers[str] = Callers(self.box, lambda _room, _opener: False)
        self.heard: list[str] = []

    async def call(self) -> None:
        async with self.callers.calling(ROOM, OPENER, RUN, 3) as replies:
            while self.heard[-1:] != ["over"]:
                self.heard.append(await replies.get())

    async def started(self) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(self.call())
        await asyncio.sleep(0)
        return task

    def taken(self) -> list[str | None]:
        commands = group_pb2.Commands.FromString(self.box.take()).commands
        assert {each.cancel.opener for each in commands if each.HasField("cancel")} <= {OPENER}
        return [command.WhichOneof("what") for command in commands]


async def test_a_call_hears_everything_from_its_rooms_opening_on() -> None:
    at = Bench()
    task = await at.started()
    assert at.taken() == ["run"]
    replies = at.callers.take(ROOM)
    assert replies is not None
    replies.put_nowait("accepted")
    at.box.answer(None)
    replies.put_nowait("over")
    await task
    assert at.heard == ["accepted", "over"]
    assert at.taken() == [], "a room that ended by itself is not cancelled"
    assert len(at.callers) == 0


async def test_a_second_call_is_refused_and_takes_nothing_from_the_first() -> None:
    at = Bench()
    task = await at.started()
    with pytest.raises(RoomExists):
        await at.call()
    assert at.taken() == ["run"]
    assert at.callers.take(ROOM) is not None
    at.box.answer(None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_call_that_is_refused_leaves_nothing() -> None:
    at = Bench()
    task = await at.started()
    at.taken()
    at.box.answer(Refusal("no"))
    with pytest.raises(Refusal):
        await task
    assert at.taken() == []
    assert len(at.callers) == 0


@pytest.mark.parametrize("opened", [False, True])
async def test_a_call_that_ends_early_cancels_its_room(opened: bool) -> None:
    at = Bench()
    task = await at.started()
    if opened:
        at.taken()
        at.callers.take(ROOM)
        at.box.answer(None)
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert at.taken() == (["cancel"] if opened else ["run", "cancel"]), "after the room, in this order"
    assert len(at.callers) == 0


async def test_a_generator_that_is_closed_cancels_its_room() -> None:
    at = Bench()

    async def handler() -> AsyncGenerator[str, None]:
        async with at.callers.calling(ROOM, OPENER, RUN, 3) as replies:
            while True:
                yield await replies.get()

    stream = handler()
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    at.taken()
    replies = at.callers.take(ROOM)
    assert replies is not None
    at.box.answer(None)
    replies.put_nowait("accepted")
    assert await task == "accepted"
    await stream.aclose()
    assert at.taken() == ["cancel"]
