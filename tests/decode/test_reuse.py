"""Tests of the prefix cache on decode: only missing pages are exposed and asked for."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.ids import PageId, RoomId
from baton.pages.kv_checksum import KvChecksum
from baton.pages.pool import PageState
from tests.decode.bench import DecodeBench, decoding
from tests.prefill import toy
from tests.prefill.bench import DEADLINE_MS, PAGES

PROMPT = tuple(range(200, 210))
"""A prompt of two whole pages of four tokens, and half of one."""


@pytest.fixture(params=[KvChecksum.RECORD, KvChecksum.PAGES], ids=lambda each: each.value)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[DecodeBench]:
    async with decoding(reuse=True, checksum=request.param) as made:
        yield made


async def serve(
    bench: DecodeBench, room: int, prompt: tuple[int, ...], max_tokens: int = 3, salt: int = 0
) -> int:
    """Serve one request to its end, and return the number of prefix tokens that the sender was told are
    cached."""
    asked = replace(toy.request(str(room), prompt, max_tokens=max_tokens), salt=salt)
    caller = await bench.stream(asked)
    grant = await bench.granted(room)
    assert bench.pages(PageState.EXPOSED) == len(grant.pages[0].pages)
    assert not [page for page in grant.pages[0].pages if PageId(page) in bench.holdings.prefixes]
    bench.land(asked)
    await bench.settle()
    assert await caller.outcome() == ""
    assert caller.tokens == toy.answer(asked)
    bench.assert_empty()
    return grant.prefix_tokens


async def test_what_is_held_is_not_asked_for_again(bench: DecodeBench) -> None:
    assert await serve(bench, 1, PROMPT) == 0
    assert await serve(bench, 1001, (*PROMPT[:8], 7, 8)) == 8
    assert len(bench.sender.grants[1001].pages[0].pages) == 1
    assert bench.gauge("baton_prefix_reused_tokens_total") == 8


async def test_zero_page_hand_over_of_a_prompt_that_is_held_whole(bench: DecodeBench) -> None:
    await serve(bench, 1, PROMPT[:8])
    assert await serve(bench, 1001, PROMPT[:8]) == 8
    assert len(bench.sender.grants[1001].pages[0].pages) == 0


async def test_what_was_answered_is_held_for_the_next_question(bench: DecodeBench) -> None:
    """All tokens of the answer are cached but the last, whose KV was never computed."""
    await serve(bench, 1, PROMPT, max_tokens=7)
    said = tuple(toy.answer(toy.request("1", PROMPT, max_tokens=7)))
    assert await serve(bench, 1001, PROMPT + said) == 16
    assert await serve(bench, 2001, PROMPT + said[:2] + said[:2]) == 12


async def test_same_root_only_prompts_and_answers_of_another_salt_are_asked_for_anew(
    bench: DecodeBench,
) -> None:
    await serve(bench, 1, PROMPT, max_tokens=7)
    assert await serve(bench, 1001, PROMPT, max_tokens=7, salt=1) == 0
    said = tuple(toy.answer(toy.request("1", PROMPT, max_tokens=7)))
    held = [await serve(bench, 2001 + 1000 * salt, PROMPT + said, salt=salt) for salt in (2, 1, 0)]
    assert held == [0, 16, 16]


async def test_what_a_stopped_room_was_answered_is_not_kept(bench: DecodeBench) -> None:
    """The ranks of a group need not have seen the same steps end."""
    asked = toy.request("1", PROMPT, max_tokens=12)
    caller = await bench.stream(asked)
    await bench.granted(1)
    bench.land(asked)
    await bench.turns_until(lambda: len(caller.tokens) > 7)
    await bench.cancel(1)
    await bench.settle()
    bench.assert_empty()
    assert bench.pages(PageState.CACHED) == 2


async def test_what_a_failed_room_was_sent_is_not_kept_and_what_it_used_is_there_at_once(
    bench: DecodeBench,
) -> None:
    await serve(bench, 1, PROMPT, max_tokens=1)
    await bench.stream(toy.request("1001", PROMPT + PROMPT, max_tokens=3))
    await bench.granted(1001)
    assert bench.holdings.prefixes.evictable == 0
    await bench.cancel(1001)
    await bench.turns_until(lambda: bench.pages(PageState.QUARANTINED) > 0)
    assert bench.pages(PageState.CACHED) == 2
    assert bench.pages(PageState.QUARANTINED) == len(bench.sender.grants[1001].pages[0].pages) == 3
    bench.sender.quiet.set()
    await bench.settle()
    bench.assert_empty()
    assert bench.pages(PageState.CACHED) == 2


async def test_two_rooms_that_begin_alike_at_once_go_on_with_the_same_pages(bench: DecodeBench) -> None:
    asked = [toy.request(str(room), PROMPT, max_tokens=6) for room in (1, 1001)]
    callers = [await bench.stream(each) for each in asked]
    for each in asked:
        await bench.granted(int(each.request_id))
    for each in asked:
        bench.land(each)
    await bench.turns_until(lambda: all(len(caller.tokens) > 1 for caller in callers))
    tables = [bench.holdings.get(room).pages[0] for room in map(RoomId, (1, 1001)) if room in bench.holdings]
    assert len({table[:2] for table in tables}) == 1
    await bench.settle()
    assert [caller.tokens for caller in callers] == [toy.answer(each) for each in asked]
    bench.assert_empty()


async def test_what_a_failed_step_was_computed_from_is_not_held_any_more(bench: DecodeBench) -> None:
    """Otherwise one bad page would fail all requests that begin with it, and those that share their steps."""
    assert await serve(bench, 1, PROMPT) == 0
    assert await serve(bench, 1001, PROMPT) == 8
    asked = toy.request("2001", PROMPT, max_tokens=3)
    caller = await bench.stream(asked)
    assert (await bench.granted(2001)).prefix_tokens == 8
    bench.land(asked)
    await bench.turns_until(lambda: len(caller.tokens) > 0)
    bench.engine.fail_next = ValueError("no")
    await bench.settle()
    assert await caller.outcome() == "engine_failed"
    bench.assert_empty()
    assert await serve(bench, 3001, PROMPT) == 0
    assert await serve(bench, 4001, PROMPT) == 8


async def test_it_is_asked_for_anew_while_the_room_that_failed_is_in_quarantine() -> None:
    async with decoding(reuse=True, checksum=KvChecksum.PAGES) as bench:
        await serve(bench, 1, PROMPT)
        asked = toy.request("1001", PROMPT, max_tokens=3)
        caller = await bench.stream(asked)
        assert (await bench.granted(1001)).prefix_tokens == 8
        bench.engine.fail_next = ValueError("no")
        bench.land(asked)
        await bench.turns_until(lambda: bench.pages(PageState.QUARANTINED) == 1)
        assert await caller.outcome() == "engine_failed"
        await bench.stream(toy.request("2001", PROMPT, max_tokens=3))
        assert (await bench.granted(2001)).prefix_tokens == 0
        assert bench.pages(PageState.QUARANTINED) == 1
        await bench.cancel(2001)
        bench.sender.quiet.set()
        await bench.settle()
        bench.assert_empty()


async def test_the_oldest_prefix_is_given_up_for_a_room_that_needs_the_space(bench: DecodeBench) -> None:
    await serve(bench, 1, PROMPT)
    long = tuple(range(300, 300 + (PAGES - 1) * toy.PAGE_TOKENS))
    await serve(bench, 2, long, max_tokens=1)
    assert await serve(bench, 1001, PROMPT) == 4


async def test_what_is_held_is_held_still_when_exposed_memory_was_taken_back(bench: DecodeBench) -> None:
    await serve(bench, 1, PROMPT, max_tokens=1)
    await bench.stream(toy.request("1001", PROMPT, max_tokens=1))
    await bench.granted(1001)
    await bench.cancel(1001)
    await bench.turns_until(lambda: bench.pages(PageState.QUARANTINED) == 1)
    bench.clock.advance(DEADLINE_MS)
    await bench.settle()
    assert bench.gauge("baton_kv_revocations_total") == 1
    assert await serve(bench, 2001, PROMPT) == 8
