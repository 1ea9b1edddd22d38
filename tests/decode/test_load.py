"""Tests of the load that a decode worker reports: what it could grant, and what waiting rooms need."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.decode.decode_service import DecodeService
from baton.wire.baton.v1 import inference_pb2
from baton.wire.load_messages import load_from_wire
from tests.decode.bench import DecodeBench, decoding
from tests.prefill import toy
from tests.prefill.bench import DECODE

PAGES = 12
PROMPT = tuple(range(200, 206))
LONG = 30
"""Tokens of an answer: a room with so many to come may grow."""


@pytest.fixture
async def bench() -> AsyncIterator[DecodeBench]:
    async with decoding(pages=PAGES, max_running=3) as made:
        yield made


async def test_what_is_granted_what_waits_and_what_is_left_for_those_that_run_is_told_apart(
    bench: DecodeBench,
) -> None:
    first = load_from_wire(bench.work.load())
    assert (first.free, first.requested, first.waiting) == ((PAGES,), (0,), 0)
    assert (first.running, first.running_max, first.entered) == (0, 3, 0)
    asked = [toy.request(str(room), PROMPT, max_tokens=LONG) for room in (7, 9, 8, 5)]
    for request in asked[:2]:
        await bench.stream(request)
        await bench.granted(int(request.request_id))
    second = load_from_wire(bench.work.load())
    assert second.free == (PAGES - 2 * (2 + 1) - 2,), (
        "two pages of each prompt, one more, and one to grow into"
    )
    assert (second.requested, second.waiting, second.running, second.entered) == ((0,), 0, 2, 9)
    for request in asked[2:]:
        await bench.stream(request)
    await bench.turns(5)
    third = load_from_wire(bench.work.load())
    assert (third.free, third.requested, third.waiting) == ((0,), (4,), 1), (
        "one more was granted, and one waits"
    )
    assert (third.running, third.entered) == (3, 9)
    assert first.number < second.number < third.number
    for request in asked:
        await bench.cancel(int(request.request_id))
    await bench.turns(5)
    assert load_from_wire(bench.work.load()).waiting == 0


async def test_nothing_can_be_granted_while_all_memory_is_about_to_be_taken_back(bench: DecodeBench) -> None:
    bench.receiving.revoking = True
    assert load_from_wire(bench.work.load()).free == (0,)
    bench.receiving.revoking = False


async def test_of_several_choices_each_is_a_sequence(bench: DecodeBench) -> None:
    await bench.stream(toy.request("4", PROMPT, max_tokens=8, further_seeds=(1, 2)))
    await bench.granted(4)
    told = load_from_wire(bench.work.load())
    assert (told.running, told.free) == (3, (PAGES - 3 - 3,))
    await bench.cancel(4)


async def test_it_is_told_with_each_renewal(bench: DecodeBench) -> None:
    renewal = bench.work.holds()
    assert renewal.HasField("load")
    assert renewal.census.pages["free"] == PAGES


async def test_it_is_told_with_the_message_in_which_a_room_is_refused_or_ends(bench: DecodeBench) -> None:
    async def asked() -> AsyncIterator[inference_pb2.StreamRoomsRequest]:
        stranger = inference_pb2.StreamRoomRequest(room=1, incarnation=DECODE + 1)
        yield inference_pb2.StreamRoomsRequest(open=[stranger])

    nobody: Any = None
    service = DecodeService(bench.work)
    [message] = [each async for each in service.rooms(asked(), nobody)]
    assert message.lines[0].HasField("refused")
    assert load_from_wire(message.load).free == (PAGES,)
