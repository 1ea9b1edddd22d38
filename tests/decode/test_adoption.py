"""Tests of rooms on a decode worker whose router's stream broke, and that another router adopts."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import pytest

from baton.ids import Opener, RoomId
from baton.rooms.errors import NotOrphaned, UnknownRoom
from baton.rooms.request import Request
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import cause_to_wire
from baton.wire.load_messages import adoption_key, load_from_wire, orphans_from_wire
from baton.worker.callers import STREAM_ENDED
from tests.decode.bench import Caller, DecodeBench, decoding
from tests.decode.test_choices import answers, asked
from tests.prefill.bench import PREFILL

OURS, THEIRS = Opener(11), Opener(22)
ROOM: Final = RoomId(1)


@pytest.fixture
async def bench() -> AsyncIterator[DecodeBench]:
    async with decoding() as made:
        yield made


async def orphaned(bench: DecodeBench, request: Request, tokens: int = 0) -> Caller:
    """Return the caller of a room that has `tokens` tokens of choice 0, and whose stream has broken."""
    caller = await bench.stream(request, opener=OURS)
    await bench.granted(ROOM)
    if tokens:
        bench.land(request)
        await bench.turns_until(lambda: len(bench.receiving.roster.get(ROOM).outputs[0]) >= tokens)
    cause = cause_to_wire(STREAM_ENDED)
    orphan = inference_pb2.CancelRequest(room=ROOM, cause=cause, opener=OURS)
    await bench.enter(group_pb2.Command(orphan=orphan))
    return caller


async def adopt(
    bench: DecodeBench, request: Request, opener: Opener = THEIRS
) -> "asyncio.Queue[inference_pb2.StreamRoomReply]":
    """Adopt the room that computes a request, and return the queue of its replies. Raises Refusal."""
    replies: asyncio.Queue[inference_pb2.StreamRoomReply] = asyncio.Queue()
    wish = inference_pb2.AdoptRequest(room=ROOM, opener=opener, key=adoption_key(request))
    asking = asyncio.ensure_future(bench.work.callers.open(ROOM, group_pb2.Command(adopt=wish), replies))
    await asyncio.sleep(0)
    await bench.turn()
    await asking
    return replies


def read(replies: "asyncio.Queue[inference_pb2.StreamRoomReply]") -> dict[int, list[int]]:
    """Return the output of each choice, merged by position, of a room that was answered."""
    outputs: dict[int, list[int]] = {}
    accepted, *others, last = [replies.get_nowait() for _ in range(replies.qsize())]
    assert accepted.accepted.term == 1
    assert last.HasField("outcome")
    assert not last.outcome.HasField("cause")
    for part in (each.tokens for each in others):
        output = outputs.setdefault(part.choice, [])
        assert part.first <= len(output), "no position is left out"
        output[part.first :] = [each.token for each in part.tokens]
    return outputs


@pytest.mark.parametrize("tokens", [0, 1, 3])
async def test_adopt_first_wins_the_adopter_gets_all_output_from_the_first_token_on(
    bench: DecodeBench, tokens: int
) -> None:
    request = asked()
    caller = await orphaned(bench, request, tokens)
    assert [each.prefill for each in orphans_from_wire(bench.work.holds(THEIRS).orphans)] == [PREFILL]
    replies = await adopt(bench, request)
    assert not bench.work.holds(THEIRS).orphans
    assert (await caller.outcome()).startswith("bootstrap_lost"), "whoever still reads it is told"
    with pytest.raises(NotOrphaned):
        await adopt(bench, request, Opener(33))
    await bench.cancel(ROOM, OURS)
    if not tokens:
        bench.land(request)
    await bench.settle()
    assert read(replies) == answers(request)
    assert bench.gauge("baton_rooms_orphaned_total") == bench.gauge("baton_rooms_adopted_total") == 1
    bench.assert_empty()


async def test_the_output_of_earlier_rooms_is_sent_to_the_adopter_too(bench: DecodeBench) -> None:
    whole = asked(choices=1)
    await orphaned(bench, replace(whole, output=tuple(answers(whole)[0][:2])))
    replies = await adopt(bench, whole)
    bench.land(replace(whole, output=tuple(answers(whole)[0][:2])), first=answers(whole)[0][2])
    await bench.settle()
    assert read(replies) == answers(whole)


async def test_a_room_that_was_answered_is_not_here_any_more(bench: DecodeBench) -> None:
    request = asked(choices=1)
    await orphaned(bench, request, tokens=1)
    await bench.settle()
    with pytest.raises(UnknownRoom):
        await adopt(bench, request)


async def test_a_room_is_given_only_for_the_request_that_it_computes(bench: DecodeBench) -> None:
    request = asked(choices=1)
    await orphaned(bench, request)
    with pytest.raises(NotOrphaned):
        await adopt(bench, replace(request, max_tokens=2))
    bench.sender.quiet.set()
    bench.clock.advance(60_000)
    await bench.settle()
    assert bench.gauge("baton_rooms_failed_total", reason="orphaned") == 1
    bench.assert_empty()


async def test_a_room_whose_log_probabilities_are_not_stored_ends_with_its_stream(bench: DecodeBench) -> None:
    request = asked(choices=1)
    bench.sender.quiet.set()
    caller = await orphaned(bench, replace(request, sampling=replace(request.sampling, top_logprobs=1)))
    await bench.settle()
    assert (await caller.outcome()).startswith("bootstrap_lost")
    bench.assert_empty()


async def test_an_adopted_room_counts_as_its_adopters_and_not_among_the_ids_that_it_issued(
    bench: DecodeBench,
) -> None:
    request = asked(choices=1)
    await orphaned(bench, request)
    before = load_from_wire(bench.work.load(THEIRS))
    assert (before.entered, before.other_rooms) == (0, 1)
    await adopt(bench, request)
    after = load_from_wire(bench.work.load(THEIRS))
    assert (after.entered, after.other_rooms) == (0, 0)
    assert load_from_wire(bench.work.load(OURS)).other_rooms == 1
    bench.land(request)
    await bench.settle()
