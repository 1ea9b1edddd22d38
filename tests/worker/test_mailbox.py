"""Tests of the mailbox of commands: they enter turns in order, get their own answers, and are bounded."""

import asyncio

import pytest

from baton.parallel.rank_group import COMMAND_BYTES_MAX
from baton.rooms.errors import RoomExists
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.errors import CommandTooLong, MailboxFull
from baton.wire.message_limits import TAKEN_BYTES_MAX
from baton.worker import mailbox as module
from baton.worker.mailbox import Mailbox
from tests.patience import PATIENCE_S
from tests.sim.loop import VirtualLoop


def cancel(room: int) -> group_pb2.Command:
    return group_pb2.Command(cancel=inference_pb2.CancelRequest(room=room))


def rooms(taken: bytes) -> list[int]:
    return [command.cancel.room for command in group_pb2.Commands.FromString(taken).commands]


async def test_commands_are_taken_once_in_the_order_in_which_they_came() -> None:
    box = Mailbox()
    asked = asyncio.ensure_future(box.submit(cancel(1)))
    await asyncio.sleep(0)
    box.put(cancel(2))
    assert not box.empty
    assert rooms(box.take()) == [1, 2]
    assert box.take() == b""
    assert box.empty
    box.answer(None)
    await asked


async def test_each_gets_the_answer_to_its_own_command() -> None:
    box = Mailbox()
    asked = [asyncio.ensure_future(box.submit(cancel(room))) for room in (1, 2, 3)]
    await asyncio.sleep(0)
    box.put(cancel(4))
    box.take()
    asked.append(asyncio.ensure_future(box.submit(cancel(5))))
    await asyncio.sleep(0)
    asked[1].cancel()
    await asyncio.sleep(0)
    for error in (None, None, RoomExists("3"), RoomExists("4")):
        box.answer(error)
    await asked[0]
    with pytest.raises(asyncio.CancelledError):
        await asked[1]
    with pytest.raises(RoomExists, match="3"):
        await asked[2]
    assert not asked[3].done(), "it was not taken yet"
    box.take()
    box.answer(None)
    await asked[3]


def test_live_is_not_lost_a_command_waits_for_its_turn_as_long_as_its_caller_does() -> None:
    async def an_hour_later() -> None:
        box = Mailbox()
        asked = asyncio.ensure_future(box.submit(cancel(1)))
        left = asyncio.ensure_future(box.submit(cancel(2)))
        await asyncio.sleep(3_600)
        assert not asked.done()
        left.cancel()
        await asyncio.sleep(0)
        assert rooms(box.take()) == [1, 2], "whoever has left has asked all the same"
        box.answer(None)
        box.answer(None)
        await asked

    loop = VirtualLoop()
    loop.run_until(loop.create_task(an_hour_later()))
    loop.forget()


async def test_past_its_bound_askers_are_refused_and_what_follows_is_still_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMMANDS_MAX", 2)
    box = Mailbox()
    for room in (1, 2):
        box.put(cancel(room))
    with pytest.raises(MailboxFull):
        await box.submit(cancel(3))
    for room in (4, 5):
        box.put(cancel(room))
    with pytest.raises(MailboxFull):
        box.put(cancel(6))
    assert rooms(box.take()) == [1, 2, 4, 5]


async def test_a_burst_of_commands_makes_no_turn_long() -> None:
    box = Mailbox()
    for room in range(1, 101):
        box.put(cancel(room))
    for room in range(101, 201):
        prompt = inference_pb2.InferenceRequest(prompt=range(1_000, 1_001 if room < 150 else 9_000))
        run = inference_pb2.RunRoomRequest(room=room, request=prompt)
        box.put(group_pb2.Command(run=run))
    taken: list[int] = []
    while not box.empty:
        lap = group_pb2.Commands.FromString(box.take())
        assert len(lap.commands) <= module.TURN_COMMANDS_MAX
        openings = [command for command in lap.commands if command.WhichOneof("what") == "run"]
        assert len(openings) <= module.TURN_OPENINGS_MAX
        assert lap.ByteSize() <= module.TURN_BYTES_MAX
        taken += [command.run.room or command.cancel.room for command in lap.commands]
    assert taken == list(range(1, 201))


async def test_no_turn_takes_more_than_it_can_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.TURN_BYTES_MAX <= TAKEN_BYTES_MAX <= COMMAND_BYTES_MAX
    monkeypatch.setattr(module, "TAKEN_BYTES_MAX", 60)
    monkeypatch.setattr(module, "TURN_BYTES_MAX", 60)
    box = Mailbox()
    for room in range(1, 6):
        box.put(cancel(room))
    taken: list[int] = []
    turns = 0
    while not box.empty:
        assert box.news.is_set(), "the rest is still news"
        lap = box.take()
        assert len(lap) <= 60
        taken += rooms(lap)
        turns += 1
    assert taken == [1, 2, 3, 4, 5]
    assert turns > 1
    assert not box.news.is_set()
    prompt = inference_pb2.InferenceRequest(prompt=range(1_000, 1_100))
    with pytest.raises(CommandTooLong):
        await box.submit(group_pb2.Command(run=inference_pb2.RunRoomRequest(room=1, request=prompt)))
    assert box.empty


async def test_rest_ends_with_news_and_within_its_bound() -> None:
    box = Mailbox()
    await box.rest(0.001)
    resting = asyncio.ensure_future(box.rest(1_000))
    await asyncio.sleep(0)
    box.wake()
    await asyncio.wait_for(resting, PATIENCE_S)
    box.take()
    box.put(cancel(1))
    await asyncio.wait_for(box.rest(1_000), PATIENCE_S)


async def test_a_follower_answers_nobody() -> None:
    Mailbox().answer(RoomExists("x"))


async def test_an_answer_that_is_held_is_given_later_and_the_others_keep_their_order() -> None:
    box = Mailbox()
    asked = [asyncio.ensure_future(box.submit(cancel(room))) for room in (1, 2, 3)]
    await asyncio.sleep(0)
    box.take()
    box.answer(None)
    later = box.hold()
    box.answer(RoomExists("3"))
    await asked[0]
    with pytest.raises(RoomExists, match="3"):
        await asked[2]
    assert not asked[1].done()
    later(RoomExists("2"))
    later(None)
    with pytest.raises(RoomExists, match="2"):
        await asked[1]


async def test_an_answer_that_is_held_for_nobody_is_given_to_nobody() -> None:
    """A held answer has no receiver on a follower, and where the caller has left."""
    Mailbox().hold()(RoomExists("x"))
    box = Mailbox()
    asked = asyncio.ensure_future(box.submit(cancel(1)))
    await asyncio.sleep(0)
    box.take()
    later = box.hold()
    asked.cancel()
    await asyncio.sleep(0)
    later(RoomExists("1"))


async def test_when_no_turn_comes_any_more_whoever_waits_is_told_so() -> None:
    """This covers callers whose commands were taken and callers whose commands were not."""
    box = Mailbox()
    taken = asyncio.ensure_future(box.submit(cancel(1)))
    await asyncio.sleep(0)
    box.take()
    waiting = asyncio.ensure_future(box.submit(cancel(2)))
    await asyncio.sleep(0)
    box.fail(RoomExists("the end"))
    for each in (taken, waiting):
        with pytest.raises(RoomExists, match="the end"):
            await each
    assert box.empty


async def test_who_asks_when_no_turn_comes_any_more_is_told_so_at_once() -> None:
    box = Mailbox()
    box.fail(RoomExists("the end"))
    with pytest.raises(RoomExists, match="the end"):
        await box.submit(cancel(1))
    assert box.empty
