"""Tests of the decode worker's decision to compute a whole prompt itself where that is sooner."""

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise

import pytest

from baton.ids import RoomId
from baton.pages.pool import PageState
from baton.rooms.errors import Refusal
from baton.rooms.phases import Phase
from baton.rooms.request import Request
from baton.rooms.steps.local_prefill import (
    KNOWN_STEPS,
    ConcurrentDecode,
    JoiningRoom,
    PromptTiming,
    choose_local_prefill,
)
from baton.wire.baton.v1 import group_pb2, inference_pb2, rooms_pb2
from baton.wire.conversions import request_to_wire
from tests.decode.bench import DecodeBench, decoding
from tests.decode.test_group import grouped
from tests.decode.test_growth import asked, running
from tests.prefill import toy
from tests.prefill.bench import DECODE, PREFILL

GAP_MS = 50
LATE_MS = 60_000
"""Time after which prefill would have the prompt computed, ms: so long that decode computes it."""


@pytest.fixture
async def bench() -> AsyncIterator[DecodeBench]:
    async with decoding(pages=16, reuse=True, local_gap_ms=GAP_MS) as made:
        yield made


def long(room: int, tokens: int = 30, **told: object) -> Request:
    return asked(room, arrived_ms=room, prompt=tuple(range(tokens)), **told)  # type: ignore[arg-type]


async def test_mine_or_granted_a_prompt_that_prefill_has_late_is_computed_here(bench: DecodeBench) -> None:
    caller = await bench.stream(long(1), prefill_ms=LATE_MS)
    await bench.settle()
    assert await caller.outcome() == ""
    assert caller.tokens == toy.answer(long(1))
    [told] = bench.sender.grants.values()
    assert told.mine
    assert not told.pages
    assert not told.generation
    bench.assert_empty()


@pytest.mark.parametrize("prefill_ms", [None, 0])
async def test_mine_or_granted_a_prompt_that_prefill_has_at_once_is_granted(
    bench: DecodeBench, prefill_ms: int | None
) -> None:
    caller = await bench.stream(long(1), prefill_ms=prefill_ms)
    assert not (await bench.granted(1)).mine
    bench.land(long(1))
    await bench.settle()
    assert caller.tokens == toy.answer(long(1))
    bench.assert_empty()


async def test_prompts_that_come_at_once_are_shared(
    bench: DecodeBench,
) -> None:
    """Each prompt that the worker claims delays the next ones, so it claims only some of them."""
    bench.sender.may_connect.clear()
    bench.work.scheduler.pace.stepped(0, 1, 1.0)
    bench.work.scheduler.pace.token_ms = 1.0
    for room in (1, 2, 3, 4):
        wire = inference_pb2.StreamRoomRequest(
            room=room,
            incarnation=DECODE,
            prefill=rooms_pb2.Peer(name="prefill-0", incarnation=PREFILL, address=bench.address),
            request=request_to_wire(long(room, tokens=8, max_tokens=1)),
            prefill_ms=room * 10,
            prefill_own_ms=10,
        )
        bench.mailbox.put(group_pb2.Command(stream=wire))
    bench.engine.hold()
    await bench.turns(2)
    assert [room.local for room in bench.work.roster] == [True, False, True, False]
    bench.engine.go()
    for room in (2, 4):
        await bench.cancel(room)
    bench.sender.may_connect.set()
    await bench.settle()
    bench.assert_empty()


async def test_nothing_is_exposed_for_a_local_room(bench: DecodeBench) -> None:
    bench.engine.hold()
    await bench.stream(long(1), prefill_ms=LATE_MS)
    await bench.turns_until(lambda: bench.phase(1) is Phase.COMPUTING)
    assert bench.pages(PageState.EXPOSED) == 0
    assert bench.holdings.slots.census()[PageState.EXPOSED] == 0
    bench.engine.go()
    await bench.settle()
    bench.assert_empty()


async def test_only_what_is_not_cached_is_computed_here(bench: DecodeBench) -> None:
    first = await bench.stream(long(1), prefill_ms=LATE_MS)
    await bench.settle()
    before = bench.gauge("baton_decode_prompt_tokens_total")
    again = replace(long(1001), output=tuple(first.tokens[:-2]))
    caller = await bench.stream(again, prefill_ms=LATE_MS)
    await bench.settle()
    assert [*again.output, *caller.tokens] == toy.answer(long(1))
    known = again.prefill_tokens
    missing = known - (known - 1) // toy.PAGE_TOKENS * toy.PAGE_TOKENS
    assert bench.gauge("baton_decode_prompt_tokens_total") - before == missing
    bench.assert_empty()


async def test_a_room_without_a_prefill_worker_is_computed_here(bench: DecodeBench) -> None:
    caller = await bench.stream(long(1), prefill=0)
    await bench.settle()
    assert caller.tokens == toy.answer(long(1))
    assert not bench.sender.grants
    bench.assert_empty()


async def test_all_choices_go_on_behind_a_prompt_that_was_computed_here(bench: DecodeBench) -> None:
    request = long(1, tokens=10, max_tokens=6, choices=3)
    caller = await bench.stream(request, prefill_ms=LATE_MS)
    await bench.settle()
    assert caller.choices == {at: toy.answer(request.choice(at)) for at in range(3)}
    bench.assert_empty()


async def test_a_scored_prompt_is_prefills(bench: DecodeBench) -> None:
    scored = replace(long(1), prompt_logprobs=0)
    await bench.stream(scored, prefill_ms=LATE_MS)
    assert not (await bench.granted(1)).mine
    bench.sender.quiet.set()
    await bench.cancel(1)
    await bench.settle()


async def test_sequences_that_run_wait_for_no_more_than_a_part_of_a_prompt(bench: DecodeBench) -> None:
    old = await running(bench, asked(2, arrived_ms=2))
    bench.sender.may_connect.clear()
    bench.work.scheduler.pace.token_ms, bench.work.prompt_claims.next_command_ms = GAP_MS / 5, 10**9
    await bench.enter(group_pb2.Command(compute_here=group_pb2.ComputeHere(room=3, chunk_tokens=5)))
    await bench.stream(long(1, max_tokens=6), prefill=PREFILL + 1)
    seen: list[int] = []
    bench.mailbox.put(group_pb2.Command(compute_here=group_pb2.ComputeHere(room=1, chunk_tokens=5)))
    while len(bench.work.roster) and bench.phase(1) is not Phase.SUCCESS:
        if not bench.step_thread.free:
            await bench.step_end()
        await bench.turn()
        seen.append(bench.work.roster.get(RoomId(1)).computed)
    assert max(after - before for before, after in pairwise(seen)) == 5
    bench.sender.may_connect.set()
    await bench.settle()
    assert old.tokens == toy.answer(asked(2, 2))
    bench.assert_empty()


async def test_a_local_room_ends_while_it_is_computed_and_its_pages_stay_until_its_step_has_ended(
    bench: DecodeBench,
) -> None:
    bench.engine.hold()
    caller = await bench.stream(long(1), prefill_ms=LATE_MS)
    await bench.turns_until(lambda: not bench.step_thread.free)
    await bench.cancel(1)
    await bench.turns(3)
    assert await caller.outcome() == "cancelled"
    assert bench.phase(1) is Phase.FAILED
    assert bench.pages(PageState.FREE) < bench.holdings.sizes[0]
    bench.engine.go()
    await bench.settle()
    assert not bench.sender.closes, "nobody may write there"
    bench.assert_empty()


async def test_a_sender_that_is_gone_does_not_end_what_is_computed_here(bench: DecodeBench) -> None:
    bench.engine.hold()
    caller = await bench.stream(long(1), prefill_ms=LATE_MS)
    await bench.turns_until(lambda: bench.phase(1) is Phase.COMPUTING)
    await bench.enter(group_pb2.Command(departed=PREFILL))
    bench.engine.go()
    await bench.settle()
    assert caller.tokens == toy.answer(long(1))
    bench.assert_empty()


async def test_a_claim_that_comes_behind_its_grant_changes_nothing(bench: DecodeBench) -> None:
    caller = await bench.stream(long(1))
    await bench.granted(1)
    bench.mailbox.put(group_pb2.Command(compute_here=group_pb2.ComputeHere(room=1, chunk_tokens=5)))
    await bench.turns(3)
    assert bench.phase(1) is Phase.TRANSFERRING
    bench.land(long(1))
    await bench.settle()
    assert caller.tokens == toy.answer(long(1))
    bench.assert_empty()


async def test_a_refused_claim_ends_nothing(bench: DecodeBench) -> None:
    bench.sender.refuse_grants.append(ValueError("the room is not here"))
    caller = await bench.stream(long(1), prefill_ms=LATE_MS)
    await bench.settle()
    assert caller.tokens == toy.answer(long(1))
    bench.assert_empty()


async def test_gate_before_agree_a_local_room_is_admitted_once_every_rank_has_computed_it() -> None:
    async with grouped(local_gap_ms=GAP_MS) as group:
        group.follower.engine.hold()
        request = asked(1, arrived_ms=1, prompt=tuple(range(10)))
        caller = await group.stream(request, prefill_ms=LATE_MS)
        for _ in range(10):
            await group.turn()
        assert [each.phase(1) for each in group.ranks] == [Phase.COMPUTING] * 2
        group.follower.engine.go()
        await group.settle()
        assert caller.tokens == toy.answer(request)
        assert [each.mine for each in group.leader.sender.grants.values()] == [True]


async def test_a_claim_that_was_not_heard_is_told_again(bench: DecodeBench) -> None:
    bench.sender.may_answer_grants.clear()
    bench.engine.hold()
    await bench.stream(long(1), prefill_ms=LATE_MS)
    await bench.granted(1)
    bench.sender.grants.clear()
    bench.sender.broken.set()
    await bench.turns_until(lambda: bench.sender.ended)
    bench.sender.broken.clear()
    assert (await bench.granted(1)).mine
    bench.sender.may_answer_grants.set()
    bench.engine.go()
    await bench.settle()


def test_what_is_said_of_a_claim_is_nothing_but_the_room() -> None:
    claim = inference_pb2.GrantRequest(room=1, receiver=2, mine=True)
    assert [field.name for field, _ in claim.ListFields()] == ["room", "receiver", "mine"]


async def test_a_sender_that_does_not_connect_does_not_end_what_is_computed_here(bench: DecodeBench) -> None:
    bench.sender.may_connect.clear()
    bench.engine.hold()
    caller = await bench.stream(long(1), prefill_ms=LATE_MS)
    await bench.granted(1)
    bench.sender.broken.set()
    await bench.turns_until(lambda: bench.sender.ended)
    await bench.turns(5)
    bench.sender.broken.clear()
    bench.sender.may_connect.set()
    bench.engine.go()
    await bench.settle()
    assert await caller.outcome() == ""
    assert caller.tokens == toy.answer(long(1))
    bench.assert_empty()


async def test_who_computes_without_prefill_computes_as_much_as_may_hold_up_those_that_run(
    bench: DecodeBench,
) -> None:
    bench.work.scheduler.pace.token_ms = 5.0
    await running(bench, asked(2, arrived_ms=2))
    await bench.stream(long(1, max_tokens=6), prefill=0)
    await bench.turns_until(lambda: bench.receiving.beside_tokens == GAP_MS // 5)
    await bench.settle()
    bench.assert_empty()


async def test_what_is_handed_over_is_not_held_up_by_a_part_that_ends_after_it_is_expected(
    bench: DecodeBench,
) -> None:
    """A local prompt is computed in large parts until the hand-over is expected, and in small ones after
    that."""
    pace, computing = bench.work.scheduler.pace, bench.work.scheduler
    pace.token_ms = pace.alone_ms = 25.0
    bench.engine.hold()
    other = asked(1, arrived_ms=1, prompt=tuple(range(100, 108)))
    caller = await bench.stream(other, prefill_ms=0)
    assert not (await bench.granted(1)).mine
    await bench.stream(long(2, max_tokens=2), prefill=0)
    handed, small = bench.work.roster.get(RoomId(1)), pace.beside_tokens
    assert small < 30
    told = ((LATE_MS, 30), (25 * 22, 22), (25 * 19, 19), (25 * 18, 19), (25, small), (LATE_MS, 30))
    for left_ms, expected in told:
        handed.prefill_by_ms = bench.clock.now_ms() + left_ms
        # What is more is told later, and what is less at once, if it is much less.
        bench.work.prompt_claims.next_command_ms = bench.clock.now_ms() + (
            0 if left_ms == LATE_MS else LATE_MS
        )
        await bench.turns(1)
        [part] = computing._prompts()
        assert part.stop - part.start == expected, left_ms
    handed.prefill_by_ms = None
    bench.work.prompt_claims.next_command_ms = bench.clock.now_ms() + LATE_MS
    await bench.turns(1)
    [part] = computing._prompts()
    assert part.stop - part.start == small, "at once, and where nobody knows"
    bench.land(other)
    bench.engine.go()
    await bench.settle()
    assert caller.tokens == toy.answer(other)
    bench.assert_empty()


async def test_a_prompt_is_not_scored_without_prefill(bench: DecodeBench) -> None:
    with pytest.raises(Refusal, match="scored"):
        await bench.stream(replace(long(1), prompt_logprobs=0), prefill=0)
    bench.assert_empty()


def test_what_one_odd_step_said_of_prompts_is_forgotten() -> None:
    pace = PromptTiming(GAP_MS, 256, 16)
    pace.stepped(64, 0, 2_000)
    assert pace.prompt_ms(512, 0, 0) == 16_000
    for _ in range(KNOWN_STEPS):
        pace.stepped(0, 4, 40)
    assert pace.prompt_ms(512, 4, 1_000) == 8 * 2 * 40


@pytest.mark.parametrize("held_up", [(0, 9), (200, 0), (20, 5)], ids=["decode", "alone", "beside"])
def test_a_step_that_was_held_up_changes_little_of_what_prompts_are_expected_to_take(
    held_up: tuple[int, int],
) -> None:
    """A pause of ten seconds is not counted as a step of ten seconds."""
    pace = measured()
    pace.stepped(20, 5, 15 + 20)
    before_ms = pace.prompt_ms(200, 5, 1_000)
    pace.stepped(*held_up, 10_000)
    after_ms = pace.prompt_ms(200, 5, 1_000)
    assert before_ms is not None
    assert after_ms is not None
    assert after_ms < 2 * before_ms


def test_a_worker_that_became_slower_is_expected_to_be_slower() -> None:
    pace = measured()
    for _ in range(50):
        pace.stepped(200, 0, 2_000)
    assert pace.alone_ms == pytest.approx(10, rel=0.01)


def test_what_a_prompt_takes_beside_others_it_takes_as_long_as_these_run() -> None:
    """After the running sequences end, the prompt is computed alone, in large parts."""
    pace = PromptTiming(20, 256, 16)
    pace.stepped(0, 4, 10)
    pace.stepped(16, 4, 34)  # 24 ms more than without
    assert pace.beside_tokens == 16
    assert pace.prompt_ms(160, 4, 5) == 5 * 10 + 160 * 1.5, "nothing else is known"
    pace.stepped(200, 0, 200)
    pace.stepped(16, 4, 34)
    assert pace.part_ms == 24 - 16
    assert pace.prompt_ms(160, 4, 1_000) == 10 * (10 + 24)
    assert pace.prompt_ms(160, 4, 5) == 5 * (10 + 24) + 80 * 1
    assert pace.prompt_ms(160, 4, 0) == 160
    assert pace.prompt_ms(10, 4, 5) == 10 + 8 + 10 * 1


def test_what_a_part_costs_by_itself_is_told_from_what_its_tokens_do() -> None:
    """The part itself costs 12 of 20 ms, so a longer prompt pays for many parts."""
    pace = PromptTiming(20, 256, 1)
    pace.stepped(0, 4, 10)
    pace.stepped(256, 0, 256)
    for _ in range(100):
        pace.stepped(pace.beside_tokens, 4, 10 + 12 + pace.beside_tokens)
    assert pace.beside_tokens == 8
    assert pace.part_ms == pytest.approx(12)
    assert pace.prompt_ms(80, 4, 1_000) == pytest.approx(10 * (10 + 12 + 8))


def test_a_small_part_alone_says_nothing_of_large_ones() -> None:
    pace = PromptTiming(50, 256, 16)
    pace.stepped(1, 0, 18)
    assert pace.alone_ms is None
    pace.stepped(256, 0, 256)
    pace.stepped(1, 0, 18)
    assert pace.alone_ms == 1


@pytest.mark.parametrize(
    ("gap_ms", "beside", "here_ms"), [(20, 16, 16 * (10 + 20) + 256), (1_000, 256, 10 + 256 + 256)]
)
def test_a_part_takes_all_that_it_may_by_itself_until_one_was_measured(
    gap_ms: int, beside: int, here_ms: float
) -> None:
    """The estimate is at most that of a whole step's tokens: a longer gap makes no prompt more expensive."""
    pace = PromptTiming(gap_ms, 256, 16)
    pace.stepped(0, 1, 10)
    pace.stepped(256, 0, 256)
    assert pace.beside_tokens == beside
    assert pace.prompt_ms(256, 1, 1_000) == pytest.approx(here_ms)


def measured() -> PromptTiming:
    """Return timings in which a step takes 10 ms and 1 ms per sequence, a prompt token 1 ms, and a part
    nothing."""
    pace = PromptTiming(20, 256, 20)
    pace.stepped(256, 0, 256)
    for _ in range(50):
        for sequences in (1, 5, 9):
            pace.stepped(0, sequences, 10 + sequences)
    pace.part_ms = 0.0
    return pace


def test_a_step_is_as_long_as_one_of_so_many_sequences() -> None:
    pace = measured()
    assert pace.prompt_ms(200, 1, 1_000) == pytest.approx(10 * 11 + 200, rel=0.01)
    assert pace.prompt_ms(200, 9, 1_000) == pytest.approx(10 * 19 + 200, rel=0.01)


def test_a_step_is_as_long_as_the_last_ones_were() -> None:
    """KV grows longer, and after twenty steps the estimate follows."""
    pace = measured()
    for _ in range(20):
        pace.stepped(0, 5, 30)
    assert pace.step_ms(5) == pytest.approx(30, rel=0.05)


@pytest.mark.parametrize(
    ("left_ms", "here_ms"),
    [
        ([], 200),
        ([201], 200),
        ([0], 10 * 11 + 200),
        ([0, 100, 199, 250, 1_000], 10 * 14 + 200),
        ([0, 0, 0, 0, 0, 0, 0, 0], 10 * 15 + 200),
    ],
    ids=["nobody", "behind it", "at once", "one after the other", "more than a step continues"],
)
def test_what_is_handed_over_meanwhile_runs_beside_a_prompt(left_ms: list[float], here_ms: float) -> None:
    """Rooms that join meanwhile make steps longer. The prompt is left to prefill if prefill would be
    sooner."""
    pace = measured()
    beside = ConcurrentDecode(0, 0, [JoiningRoom(each, 1, 1_000) for each in left_ms], 5)
    why = choose_local_prefill(pace, 200, 200, 0, 10_000, beside)
    assert why is not None
    assert why.here_ms == pytest.approx(here_ms, rel=0.02)
    assert choose_local_prefill(pace, 200, 200, 0, here_ms * 0.97, beside) is None


async def test_what_is_handed_over_soon_leaves_a_prompt_to_prefill(bench: DecodeBench) -> None:
    """Alone, the prompt would take 30 ms here. Beside a room that joins in 5 ms it takes one step for each
    part."""
    bench.work.scheduler.pace = bench.work.prompt_claims.pace = measured()
    other = asked(1, arrived_ms=1, prompt=tuple(range(100, 108)), max_tokens=50)
    await bench.stream(other, prefill_ms=5)
    assert not (await bench.granted(1)).mine
    await bench.stream(long(2, tokens=30), prefill_ms=35)
    assert not (await bench.granted(2)).mine
    bench.land(other)
    bench.land(long(2, tokens=30))
    await bench.settle()
    bench.assert_empty()
