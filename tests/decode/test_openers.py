"""Tests that a room on a worker obeys the router that opened it, and no other (`opener-owns`)."""

from collections.abc import AsyncIterator

import pytest

from baton.ids import NO_OPENER, Opener, RoomId
from baton.rooms.errors import RoomExists
from baton.wire.load_messages import load_from_wire
from tests.decode.bench import DecodeBench, decoding
from tests.decode.test_choices import answers, asked, end_choice
from tests.prefill import toy

OURS, THEIRS = Opener(11), Opener(22)


@pytest.fixture
async def bench() -> AsyncIterator[DecodeBench]:
    async with decoding() as made:
        yield made


@pytest.mark.parametrize("opener", [THEIRS, NO_OPENER])
async def test_opener_owns_what_another_router_ends_goes_on_and_is_counted(
    bench: DecodeBench, opener: Opener
) -> None:
    request = asked(choices=2)
    caller = await bench.stream(request, opener=OURS)
    await bench.granted(1)
    await bench.cancel(1, opener)
    await end_choice(bench, 0, opener=opener)
    assert bench.gauge("baton_rooms_unknown_news_total") == 2
    bench.land(request)
    await bench.settle()
    assert await caller.outcome() == ""
    assert caller.choices == answers(request)
    bench.assert_empty()


async def test_opener_owns_the_rooms_own_router_ends_it(bench: DecodeBench) -> None:
    caller = await bench.stream(asked(choices=2), opener=OURS)
    await bench.granted(1)
    bench.sender.quiet.set()
    await bench.cancel(1, OURS)
    await bench.settle()
    assert (await caller.outcome()).startswith("cancelled")
    assert bench.gauge("baton_rooms_unknown_news_total") == 0


async def test_opener_owns_an_id_that_is_open_is_refused_to_another_router(bench: DecodeBench) -> None:
    request = asked(choices=1)
    caller = await bench.stream(request, opener=OURS)
    with pytest.raises(RoomExists):
        await bench.stream(request, opener=THEIRS)
    await bench.granted(1)
    bench.land(request)
    await bench.settle()
    assert await caller.outcome() == ""
    bench.assert_empty()


async def test_each_router_is_told_of_the_highest_of_its_own_rooms(bench: DecodeBench) -> None:
    for room, opener in ((7, OURS), (9, THEIRS), (5, OURS)):
        await bench.stream(toy.request(str(room), (1, 2, 3), max_tokens=2), opener=opener)
    entered = {each: load_from_wire(bench.work.load(each)).entered for each in (OURS, THEIRS, Opener(33))}
    assert entered == {OURS: 7, THEIRS: 9, Opener(33): 0}
    assert bench.work.holds(OURS).load.entered == 7
    others = {each: load_from_wire(bench.work.load(each)).other_rooms for each in (OURS, THEIRS)}
    assert others == {OURS: 1, THEIRS: 2}
    assert load_from_wire(bench.work.load()).entered == 9
    bench.sender.quiet.set()
    for room, opener in ((7, OURS), (9, THEIRS), (5, OURS)):
        await bench.cancel(room, opener)
    await bench.settle()
    assert not any(RoomId(room) in bench.receiving.roster for room in (5, 7, 9))
