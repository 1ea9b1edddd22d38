"""Tests that a room whose pages fail their checksum fails before any rank admits it."""

from collections.abc import AsyncIterator, Callable
from itertools import pairwise

import pytest

from baton.decode import page_check
from baton.handover.turn import Lap
from baton.pages.kv_checksum import KvChecksum
from baton.pages.pool import PageState
from baton.pages.record import SLOT_BYTES
from baton.rooms.phases import Phase
from baton.rooms.request import Request
from tests.decode.bench import Caller, DecodeBench, decoding
from tests.decode.links import closing
from tests.prefill import toy

PROMPT = tuple(range(200, 206))
ASKED = toy.request("1", PROMPT, max_tokens=7)
LONG = toy.request("2", range(300, 330), max_tokens=9)
CHECKSUM_AT = 208


@pytest.fixture
async def bench() -> AsyncIterator[DecodeBench]:
    async with decoding(checksum=KvChecksum.PAGES) as made:
        yield made


async def started(bench: DecodeBench, request: Request = ASKED) -> Caller:
    """Open a room whose sender has been told where to write."""
    caller = await bench.stream(request)
    await bench.granted(int(request.request_id))
    return caller


def flip(bench: DecodeBench, position: int, offset: int = 0, room: int = 1) -> None:
    page = bench.sender.grants[room].pages[0].pages[position // toy.PAGE_TOKENS]
    at = page * toy.GROUP.page_bytes + position % toy.PAGE_TOKENS * toy.GROUP.token_bytes
    bench.engine.memory.view[at + offset] ^= 0x40


async def test_a_room_is_admitted_when_its_pages_were_summed(bench: DecodeBench) -> None:
    caller = await started(bench)
    bench.land(ASKED)
    bench.engine.hold()
    await bench.turns(5)
    assert bench.phase(1) is Phase.TRANSFERRING, "its seal is there, its sum is not"
    assert not bench.step_thread.free
    bench.engine.go()
    await bench.settle()
    assert caller.tokens == toy.answer(ASKED)
    assert bench.engine.ran == ["sum"] + ["step"] * 6
    bench.assert_empty()


async def test_turns_go_on_while_pages_are_summed(bench: DecodeBench) -> None:
    await started(bench)
    bench.land(ASKED)
    bench.engine.hold()
    await bench.turns(3)
    await started(bench, LONG)
    assert not bench.step_thread.free
    bench.engine.go()
    bench.land(LONG)
    await bench.settle()
    bench.assert_empty()


@pytest.mark.parametrize("position", [0, 3, 4, len(PROMPT) - 1])
@pytest.mark.parametrize("offset", [0, 7, 8, 15], ids="byte{}".format)
async def test_stale_never_served_one_flipped_bit_fails_the_room_alone(
    bench: DecodeBench, position: int, offset: int
) -> None:
    caller, beside = await started(bench), await started(bench, LONG)
    bench.land(ASKED)
    flip(bench, position, offset)
    bench.land(LONG)
    await bench.turns_until(lambda: caller.task.done())
    assert await caller.outcome() == "pages_corrupt"
    assert caller.tokens == []
    assert bench.gauge("baton_rooms_failed_total", reason="pages_corrupt") == 1
    assert bench.pages(PageState.QUARANTINED) == 2, "what differs may be a write that is still to land"
    bench.sender.quiet.set()
    await bench.settle()
    assert beside.tokens == toy.answer(LONG)
    bench.assert_empty()


async def test_what_lies_behind_the_prompt_does_not_count(bench: DecodeBench) -> None:
    caller = await started(bench)
    bench.land(ASKED)
    flip(bench, len(PROMPT))
    await bench.settle()
    assert caller.tokens == toy.answer(ASKED)


async def test_a_sender_that_summed_nothing_is_not_believed(bench: DecodeBench) -> None:
    caller = await started(bench)
    no_sum: Callable[[int], int] = lambda _: 0  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.decode.bench.nonzero_sum", no_sum)
        bench.land(ASKED)
    bench.sender.quiet.set()
    await bench.settle()
    assert await caller.outcome() == "pages_corrupt"
    bench.assert_empty()


@pytest.mark.parametrize("quiet_first", [False, True])
async def test_a_room_that_ends_while_it_is_summed_keeps_its_pages_until_then(
    bench: DecodeBench, quiet_first: bool
) -> None:
    """If the pages went to another room earlier, the running checksum would read them with it."""
    caller = await started(bench)
    bench.land(ASKED)
    bench.engine.hold()
    await bench.turns(3)
    await bench.cancel(1)
    assert await caller.outcome() == "cancelled"
    if quiet_first:
        bench.sender.quiet.set()
        for _ in range(300):
            await bench.turn()
            if not closing(bench.peers):
                break
        await bench.turns(3)
    assert bench.pages(PageState.QUARANTINED) == 2
    bench.engine.go()
    if not quiet_first:
        await bench.turns_until(lambda: bench.step_thread.free)
        await bench.turns(3)
        assert bench.pages(PageState.QUARANTINED) == 2, "a sum is no proof, and comes too late for the room"
    bench.sender.quiet.set()
    await bench.settle()
    assert caller.tokens == []
    bench.assert_empty()


async def test_sums_and_steps_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is summed piece by piece, so that the batch waits for one piece at most."""
    monkeypatch.setattr(page_check, "BYTES_AT_A_TIME", 4 * toy.GROUP.token_bytes)
    async with decoding(checksum=KvChecksum.PAGES) as bench:
        ahead, behind = toy.request("1", PROMPT, 30), toy.request("2", range(300, 316), 2)
        running = await started(bench, ahead)
        bench.land(ahead)
        await bench.turns_until(lambda: bench.phase(1) is Phase.SUCCESS)
        landed = await started(bench, behind)
        bench.land(behind)
        begun = len(bench.engine.ran)
        await bench.turns_until(lambda: landed.task.done())
        assert not running.task.done()
        beside = bench.engine.ran[begun:]
        assert beside.count("sum") == 4
        assert ("sum", "sum") not in pairwise(beside)
        await bench.settle()
        assert (running.tokens, landed.tokens) == (toy.answer(ahead), toy.answer(behind))


async def test_several_rooms_share_a_piece(bench: DecodeBench) -> None:
    await started(bench)
    await started(bench, LONG)
    bench.land(ASKED)
    bench.land(LONG)
    await bench.settle()
    assert bench.engine.ran.count("sum") == 1


async def test_a_sum_that_raises_ends_its_rooms_with_that_cause(bench: DecodeBench) -> None:
    caller = await started(bench)
    bench.land(ASKED)
    bench.engine.fail_next = RuntimeError("the device is gone")
    bench.sender.quiet.set()
    await bench.settle()
    assert await caller.outcome() == "engine_failed"
    bench.assert_empty()


async def test_nothing_to_sum_is_no_news(bench: DecodeBench) -> None:
    assert await bench.turn() is Lap.IDLE
    assert bench.engine.ran == []


@pytest.mark.parametrize(
    ("checksum", "outcome"), [(KvChecksum.OFF, ""), (KvChecksum.RECORD, "record_corrupt")], ids=str
)
async def test_off_serves_a_record_whose_own_checksum_does_not_hold(
    checksum: KvChecksum, outcome: str
) -> None:
    async with decoding(checksum=checksum) as bench:
        caller = await started(bench)
        bench.land(ASKED)
        at = bench.sender.grants[1].slot * SLOT_BYTES
        bench.slots.view[at + CHECKSUM_AT] ^= 1
        bench.sender.quiet.set()
        await bench.settle()
        assert await caller.outcome() == outcome


@pytest.mark.parametrize(
    "wrong",
    [{"seal_as": (1, 99)}, {"seal_as": (2, 1)}, {"pages": 1}, {"first": toy.VOCABULARY}],
    ids=["other tenancy", "other room", "too few pages", "no such token"],
)
async def test_slot_owner_and_counts_hold_with_every_mode(wrong: dict[str, object]) -> None:
    for checksum in KvChecksum:
        async with decoding(checksum=checksum) as bench:
            caller = await started(bench)
            bench.land(ASKED, **wrong)  # type: ignore[arg-type]
            bench.sender.quiet.set()
            await bench.settle()
            assert await caller.outcome() == "record_corrupt"
