"""Tests that a running room takes pages as it grows, and that the youngest room is retracted when none is
free."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.handover.page_growth import AHEAD
from baton.handover.turn import Lap
from baton.ids import RoomId
from baton.pages.pool import PageState
from baton.rooms.phases import Phase
from baton.rooms.quarantine import HURRY
from baton.rooms.request import Request
from baton.wire.baton.v1 import group_pb2, inference_pb2
from tests.decode.bench import Caller, DecodeBench, decoding
from tests.decode.test_group import RANKS, Group, grouped
from tests.patience import PATIENCE_S
from tests.prefill import toy
from tests.prefill.bench import DEADLINE_MS

OLD, YOUNG = 1, 2


def asked(
    room: int, arrived_ms: int, max_tokens: int = 20, prompt: tuple[int, ...] = (), choices: int = 1
) -> Request:
    """Return a request whose prompt fills one page. Rooms with equal numbers modulo 1000 have equal
    prompts."""
    prompt = prompt or (room % 1000, 1, 4, 1)
    made = toy.request(str(room), prompt, max_tokens=max_tokens, further_seeds=tuple(range(1, choices)))
    return replace(made, arrived_ms=arrived_ms, sampling=replace(made.sampling, temperature=1.0, seed=0))


async def running(bench: DecodeBench, request: Request) -> Caller:
    caller = await bench.stream(request)
    await bench.granted(int(request.request_id))
    bench.land(request)
    await bench.turns_until(lambda: bench.phase(int(request.request_id)) is Phase.SUCCESS)
    return caller


def retracted(bench: DecodeBench) -> float:
    return bench.gauge("baton_decode_rooms_retracted_total")


async def test_a_grant_takes_the_prompts_pages_and_one_block_and_the_rest_comes_with_the_tokens() -> None:
    async with decoding(pages=8) as bench:
        caller = await bench.stream(asked(1, 1))
        await bench.granted(1)
        assert bench.holdings.available == (6,)
        bench.land(asked(1, 1))
        await bench.settle()
        assert await caller.outcome() == ""
        assert caller.tokens == toy.answer(asked(1, 1))
        bench.assert_empty()


async def test_oldest_goes_on_and_the_youngest_is_retracted_when_no_page_is_left() -> None:
    async with decoding(pages=8) as bench:
        young = await running(bench, asked(1, arrived_ms=9))
        old = await running(bench, asked(2, arrived_ms=5))
        await bench.settle()
        assert await old.outcome() == ""
        assert old.tokens == toy.answer(asked(2, 5))
        assert await young.outcome() == "retracted"
        told = young.tokens
        assert 1 < len(told) < 20
        assert told == toy.answer(asked(1, 9))[: len(told)]
        bench.assert_empty()


async def test_retracted_is_no_failure_its_request_goes_on_behind_what_it_has() -> None:
    async with decoding(pages=8, reuse=True) as bench:
        young = await running(bench, asked(1, arrived_ms=9))
        await running(bench, asked(1001, arrived_ms=5))
        await bench.settle()
        told = tuple(young.tokens)
        again = replace(asked(2001, arrived_ms=9), output=told)
        caller = await bench.stream(again)
        grant = await bench.granted(2001)
        assert grant.prefix_tokens >= toy.PAGE_TOKENS, "what it had computed is held"
        bench.land(again, first=toy.answer(asked(1, 9))[len(told)])
        await bench.settle()
        assert await caller.outcome() == ""
        assert [*told, *caller.tokens] == toy.answer(asked(1, 9))
        bench.assert_empty()


@pytest.mark.parametrize("choices", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
@pytest.mark.parametrize("length", [3, 4, 5, 8])
async def test_memory_as_used_each_row_has_its_page_and_none_is_taken_beside(
    length: int, max_tokens: int, choices: int
) -> None:
    """Wherever prompt and answer end in a page. The pool holds just what all choices may come to hold."""
    request = asked(1, 1, max_tokens, tuple(range(length)), choices)
    shared = (length - 1) // toy.PAGE_TOKENS
    each = -(-(length + max_tokens - 1) // toy.PAGE_TOKENS)
    pages = each + (choices - 1) * (each - shared)
    async with decoding(pages=pages) as bench:
        caller = await running(bench, request)
        granted = -(-min(length + toy.PAGE_TOKENS, length + max_tokens - 1) // toy.PAGE_TOKENS)
        await bench.settle()
        assert await caller.outcome() == ""
        assert caller.choices == {at: toy.answer(request.choice(at)) for at in range(choices)}
        grown = bench.gauge("baton_decode_pages_grown_total")
        ended_at_once = max_tokens == 1
        assert grown == (pages - granted if not ended_at_once or choices > 1 else 0)
        assert retracted(bench) == 0
        bench.assert_empty()


async def test_what_a_retraction_costs_is_counted() -> None:
    async with decoding(pages=8) as bench:
        young = await running(bench, asked(1, arrived_ms=9))
        await running(bench, asked(2, arrived_ms=5))
        await bench.settle()
        assert retracted(bench) == 1
        computed = toy.PAGE_TOKENS + len(young.tokens) - 1
        assert bench.gauge("baton_decode_retracted_tokens_total") == computed
        assert bench.gauge("baton_rooms_failed_total", reason="cancelled") == 0


async def test_oldest_goes_on_and_nobody_else_waits_for_more_than_a_step() -> None:
    """Turns go on without a rest until the pages are back. Rooms that have their pages are computed
    meanwhile."""
    async with decoding(pages=8) as bench:
        await running(bench, asked(1, arrived_ms=9))
        await running(bench, asked(2, arrived_ms=5))
        drawn: Callable[[], int] = lambda: len(bench.work.roster.get(RoomId(2)).outputs[0])  # noqa: E731
        laps, before = [], 0
        async with asyncio.timeout(PATIENCE_S):
            while not retracted(bench):
                if not bench.step_thread.free:
                    await bench.step_end()
                before = drawn()
                laps = [await bench.turn()]
        steps = bench.engine.steps
        while bench.step_thread.free:
            laps.append(await bench.turn())
            assert len(laps) <= 3
        assert laps == [Lap.BUSY] * len(laps), "nobody rests on what was decided"
        await bench.step_end()
        assert bench.engine.steps <= steps + 1
        await bench.turn()  # which starts another one
        assert drawn() > before
        await bench.settle()
        bench.assert_empty()


async def test_no_free_under_write_a_step_that_runs_keeps_its_pages_while_others_are_retracted() -> None:
    """The youngest room is retracted and its pages go to another one, while a step of the other rooms is
    held."""
    async with decoding(pages=11) as bench:
        callers = {
            room: await running(bench, asked(room, arrived_ms=room, prompt=tuple(range(length))))
            for room, length in ((1, 4), (2, 5), (3, 7))
        }
        bench.engine.hold()
        async with asyncio.timeout(PATIENCE_S):
            while not retracted(bench) or bench.step_thread.free:
                if not bench.step_thread.free:
                    bench.engine.go(1)
                    await bench.step_end()
                await bench.turn()
        used = {
            page for part in bench.work.scheduler._step for page in bench.holdings.get(part.room.id).pages[0]
        }
        await bench.turns(4)
        assert not bench.step_thread.free
        assert {bench.holdings.pools[0].state(page) for page in used} == {PageState.COMMITTED}
        bench.engine.go()
        await bench.settle()
        assert callers[1].tokens == toy.answer(asked(1, 1, prompt=tuple(range(4))))
        for room, length in ((2, 5), (3, 7)):
            right = toy.answer(asked(room, room, prompt=tuple(range(length))))
            assert callers[room].tokens == right[: len(callers[room].tokens)]
        bench.assert_empty()


async def test_oldest_goes_on_when_who_holds_the_rest_runs_too() -> None:
    """Pages of a granted room that has not landed are not taken back. Once landed, it is the youngest and is
    retracted."""
    async with decoding(pages=8) as bench:
        late = asked(YOUNG, arrived_ms=9, prompt=tuple(range(12)), max_tokens=9)
        old = await bench.stream(asked(OLD, arrived_ms=5))
        await bench.granted(OLD)
        young = await bench.stream(late)
        await bench.granted(YOUNG)
        bench.land(asked(OLD, arrived_ms=5))
        await bench.turns_until(lambda: bench.receiving.page_growth.lacks)
        await bench.turns(5)
        assert bench.step_thread.free
        assert bench.phase(YOUNG) is Phase.TRANSFERRING
        bench.land(late)
        await bench.settle()
        assert old.tokens == toy.answer(asked(OLD, 5))
        assert await young.outcome() == "retracted"
        bench.assert_empty()


async def test_oldest_goes_on_when_memory_that_is_kept_from_everybody_is_taken_back_sooner() -> None:
    """Its sender does not answer, and less than half of the pool is in quarantine."""
    async with decoding(pages=8) as bench:
        kept = asked(YOUNG, arrived_ms=9, prompt=tuple(range(12)), max_tokens=1)
        await bench.stream(kept)
        await bench.granted(YOUNG)
        await bench.cancel(YOUNG)
        await bench.turns_until(lambda: bench.pages(PageState.QUARANTINED) == 3)
        bench.clock.advance(DEADLINE_MS // HURRY)
        old = await running(bench, asked(OLD, arrived_ms=5, max_tokens=25))
        await bench.turns_until(lambda: bench.receiving.page_growth.lacks)
        await bench.turns(3)
        assert (bench.pages(PageState.QUARANTINED), retracted(bench)) == (3, 0)
        bench.clock.advance(DEADLINE_MS // HURRY)
        await bench.settle()
        assert bench.gauge("baton_kv_revocations_total") == 1
        assert old.tokens == toy.answer(asked(OLD, 5, max_tokens=25))
        bench.assert_empty()


async def test_a_revocation_that_meets_a_retraction_ends_neither() -> None:
    async with decoding(pages=11) as bench:
        kept = asked(3, arrived_ms=9, prompt=tuple(range(12)), max_tokens=1)
        await bench.stream(kept)
        await bench.granted(3)
        await bench.cancel(3)
        young = await running(bench, asked(YOUNG, arrived_ms=8))
        old = await running(bench, asked(OLD, arrived_ms=5))
        async with asyncio.timeout(PATIENCE_S):
            while not retracted(bench):
                if not bench.step_thread.free:
                    await bench.step_end()
                await bench.turn()
        bench.mailbox.put(group_pb2.Command(revoke=True))
        await bench.settle()
        assert bench.gauge("baton_kv_revocations_total") == 1
        assert await young.outcome() == "retracted"
        assert old.tokens == toy.answer(asked(OLD, 5))
        bench.assert_empty()


async def test_memory_as_used_who_begins_leaves_a_block_for_each_that_grows() -> None:
    async with decoding(pages=8) as bench:
        first = await running(bench, asked(1, arrived_ms=1, max_tokens=9))
        bench.engine.hold()
        waits = await bench.stream(asked(2, arrived_ms=2, prompt=tuple(range(20)), max_tokens=3))
        await bench.turns(5)
        assert bench.holdings.available == (6,)
        assert bench.phase(2) is Phase.WAITING_FOR_INPUT, "it takes 6, and 1 is left for the other"
        bench.engine.go()
        await bench.granted(2)
        assert await first.outcome() == ""
        bench.sender.quiet.set()
        await bench.cancel(2)
        assert await waits.outcome() == "cancelled"
        await bench.settle()
        bench.assert_empty()
        assert bench.receiving.capacity().margin == (), "nothing is left for who is gone"


async def test_memory_as_used_rooms_that_are_granted_in_one_turn_leave_a_block_each() -> None:
    async with decoding(pages=7) as bench:
        bench.sender.may_connect.clear()
        requests = [asked(room, arrived_ms=room, max_tokens=9) for room in (1, 2, 3)]
        callers = [await bench.stream(each) for each in requests]
        bench.sender.may_connect.set()
        await bench.turns_until(lambda: len(bench.sender.grants) >= 2)
        await bench.turns(3)
        phases = [bench.phase(room) for room in (1, 2, 3)]
        assert phases == [Phase.TRANSFERRING] * 2 + [Phase.WAITING_FOR_INPUT], "2 of the 3 are for the others"
        for each in requests[:2]:
            bench.land(each)
        await bench.granted(3)
        bench.land(requests[2])
        await bench.settle()
        assert [caller.tokens for caller in callers] == list(map(toy.answer, requests))
        assert retracted(bench) == 0
        bench.assert_empty()


async def test_memory_as_used_no_more_are_granted_than_may_soon_be_in_the_batch() -> None:
    async with decoding(max_running=1, pages=16) as bench:
        requests = [asked(room, arrived_ms=room, max_tokens=4) for room in (1, 2, 3)]
        callers = [await bench.stream(each) for each in requests]
        await bench.turns_until(lambda: len(bench.sender.grants) == AHEAD)
        await bench.turns(5)
        assert bench.phase(3) is Phase.WAITING_FOR_INPUT
        for each in requests[:AHEAD]:
            bench.land(each)
        await bench.granted(3)
        bench.land(requests[2])
        await bench.settle()
        assert [caller.tokens for caller in callers] == list(map(toy.answer, requests))
        bench.assert_empty()


# ---- several ranks


async def both_running(group: Group, *requests: Request) -> list[Caller]:
    callers = []
    for each in requests:
        room = int(each.request_id)
        callers.append(await group.stream(each))
        await group.granted(room)
        for rank in group.ranks:
            rank.land(each)
        await group.turns_until(lambda room=room: group.leader.phase(room) is Phase.SUCCESS)
    return callers


async def until_retracted(group: Group) -> None:
    """Take turns on every rank up to the end of the one that decides the retraction."""
    await group.turns_until(lambda: retracted(group.leader))
    assert [retracted(each) for each in group.ranks] == [1] * RANKS


def told_of(caller: Caller, request: Request) -> None:
    right = toy.answer(request)
    assert caller.tokens == right[: len(caller.tokens)]


async def test_growth_is_agreed_all_ranks_give_and_take_the_same_pages() -> None:
    """Ranks with different free pages would stop at once (`divergence-detected`)."""
    requests = [asked(1, arrived_ms=9), asked(1001, arrived_ms=5), asked(2001, arrived_ms=7)]
    async with grouped(pages=10) as group:
        callers = await both_running(group, *requests)
        await group.settle()
        assert callers[1].tokens == toy.answer(requests[1])
        assert await callers[0].outcome() == "retracted"
        for caller, request in zip(callers, requests, strict=True):
            told_of(caller, request)
        assert group.leader.holdings.prefixes.digest == group.follower.holdings.prefixes.digest
        counted = [each.gauge("baton_decode_pages_grown_total") for each in group.ranks]
        assert counted[0] == counted[1] > 0


@pytest.mark.parametrize("late", range(RANKS), ids=["the leader", "a follower"])
async def test_growth_is_agreed_where_a_choice_is_cut_and_one_rank_saw_less_of_it(late: int) -> None:
    request = asked(1, arrived_ms=5, max_tokens=12, choices=2)
    other = asked(2, arrived_ms=9, max_tokens=20)
    async with grouped(pages=9) as group:
        callers = await both_running(group, request, other)
        await group.turns_until(lambda: len(callers[0].choices.get(1, [])) > 2)
        await asyncio.gather(*(each.step_end() for each in group.ranks if not each.step_thread.free))
        group.ranks[late].engine.hold()
        for _ in range(5):
            await group.turn()
        cut = inference_pb2.EndChoiceRequest(room=1, choice=1)
        group.leader.mailbox.put(group_pb2.Command(end_choice=cut))
        await group.turn()
        group.ranks[late].engine.go()
        await group.settle()
        assert callers[0].choices[0] == toy.answer(request.choice(0))
        told_of(callers[1], other)


@pytest.mark.parametrize("where", range(RANKS), ids=["the leader", "a follower"])
@pytest.mark.parametrize("what", ["draw", "step"])
async def test_growth_is_agreed_where_one_rank_alone_sees_a_room_fail(what: str, where: int) -> None:
    first, second = asked(1, arrived_ms=5), asked(2, arrived_ms=9)
    async with grouped(pages=8) as group:
        callers = await both_running(group, first, second)
        await group.turns_until(lambda: len(callers[1].tokens) > 3)
        engine = group.ranks[where].engine
        if what == "draw":
            engine.broken.add(2)
        else:
            await asyncio.gather(*(each.step_end() for each in group.ranks if not each.step_thread.free))
            engine.fail_next = RuntimeError("out of luck")
        await group.settle()
        assert await callers[1].outcome() == "engine_failed"
        assert await callers[0].outcome() == ("" if what == "draw" else "engine_failed")
        assert [retracted(each) for each in group.ranks] == [0] * RANKS


async def test_a_worker_that_drains_retracts_and_leaves_when_the_oldest_is_answered() -> None:
    first, second = asked(1, arrived_ms=5), asked(2, arrived_ms=9)
    async with grouped(pages=8) as group:
        callers = await both_running(group, first, second)
        group.leader.mailbox.put(group_pb2.Command(drain=True))
        await group.settle()
        assert callers[0].tokens == toy.answer(first)
        assert await callers[1].outcome() == "retracted"
        assert await group.turn() == [Lap.LAST] * RANKS


async def test_a_sender_that_departs_takes_no_room_with_it_that_runs_or_is_retracted() -> None:
    first, second = asked(1, arrived_ms=5), asked(2, arrived_ms=9)
    async with grouped(pages=8) as group:
        callers = await both_running(group, first, second)
        await until_retracted(group)
        group.leader.mailbox.put(group_pb2.Command(departed=group.leader.work.roster.get(RoomId(2)).peer))
        await group.settle()
        assert callers[0].tokens == toy.answer(first)
        assert await callers[1].outcome() == "retracted"


async def test_the_leader_does_not_rest_on_a_retraction() -> None:
    """The retracted pages are free in the turn after the next one. Until then all ranks take turns without a
    rest."""
    first, second = asked(1, arrived_ms=5), asked(2, arrived_ms=9)
    async with grouped(pages=8) as group:
        await both_running(group, first, second)
        await until_retracted(group)
        laps = []
        while RoomId(2) in group.leader.work.roster:
            laps.append(await group.turn())
            assert len(laps) < 4
        assert laps == [[Lap.BUSY] * RANKS] * len(laps)
        await group.settle()


async def test_retracted_is_no_failure_a_room_stays_that_prefill_could_not_bring_back() -> None:
    async with decoding(pages=12) as bench:
        stays = replace(asked(YOUNG, arrived_ms=9), carried_tokens_max=5)
        asks = {YOUNG: stays, 3: asked(3, arrived_ms=7), OLD: asked(OLD, arrived_ms=5)}
        callers = {room: await running(bench, each) for room, each in asks.items()}
        await bench.settle()
        outcomes = {room: await caller.outcome() for room, caller in callers.items()}
        assert outcomes == {YOUNG: "", 3: "retracted", OLD: ""}
        assert callers[YOUNG].tokens == toy.answer(stays)
        bench.assert_empty()
