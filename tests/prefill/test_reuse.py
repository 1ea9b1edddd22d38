"""Tests of the prefix cache on prefill: only missing tokens are computed, and only missing pages are sent."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from baton.ids import Incarnation, RoomId
from baton.pages.holding import Holding
from baton.pages.holdings import Holdings
from baton.pages.pool import PageState
from baton.rooms.errors import PeerFault
from baton.rooms.phases import Phase
from baton.testing.memory_transfer import MemoryTransfer
from baton.testing.transfer_faults import FaultPlan
from baton.transfer.transfer_protocol import PutId, Run
from tests.prefill import toy
from tests.prefill.bench import PAGES
from tests.prefill.test_turn import Pair, computing, settle

PROMPT = tuple(range(100, 110))
"""A prompt of two whole pages of four tokens, and half of one."""
LONGER = (*PROMPT[:8], 7, 8, 9)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair(reuse=True)
    yield made
    made.bench.close()


@pytest.fixture
async def slow() -> AsyncIterator[Pair]:
    """A pair in which every write takes long."""
    made = Pair(FaultPlan(hold_share=1.0, hold_steps=100), reuse=True)
    yield made
    made.bench.close()


async def hand_over(
    pair: Pair, room: int, prompt: tuple[int, ...], pages: tuple[int, ...], prefix: int = 0, salt: int = 0
) -> int:
    """Hand over one room, and return the number of tokens that the prefill worker reports as cached."""
    asked = replace(toy.request(str(room), prompt), salt=salt)
    caller = await pair.bench.run(asked)
    await pair.bench.grant(room, pages, prefix=prefix)
    await settle(pair.bench)
    assert await caller.outcome() == ""
    assert caller.replies[1].first_token.token.token == toy.answer(asked)[0]
    record = pair.receiver.record(0, room, 5)
    assert record is not None
    assert (record.prompt_tokens, record.pages) == (len(prompt), (len(pages),))
    assert record.cached_tokens == caller.replies[1].first_token.cached_tokens
    pair.bench.assert_empty()
    assert pair.bench.engine.foreign == []
    return record.cached_tokens


def computed(pair: Pair) -> float:
    return pair.bench.gauge("baton_prefill_tokens_total")


async def test_what_was_computed_before_is_not_computed_again(pair: Pair) -> None:
    assert await hand_over(pair, 1, PROMPT, (9, 2, 3)) == 0
    assert computed(pair) == 10
    assert await hand_over(pair, 1001, LONGER, (4, 5, 6)) == 8
    assert computed(pair) == 13, "the two whole pages were there"
    assert [pair.receiver.page(page) for page in (4, 5)] == [pair.receiver.page(page) for page in (9, 2)]
    assert pair.bench.gauge("baton_prefix_reused_tokens_total") == 8
    assert pair.bench.gauge("baton_prefix_queried_tokens_total") == 21


async def test_the_last_token_is_computed_in_any_case(pair: Pair) -> None:
    """The first output token is drawn from the last prompt token's logits."""
    assert await hand_over(pair, 1, PROMPT[:8], (1, 2)) == 0
    assert await hand_over(pair, 1001, PROMPT[:8], (3, 4)) == 4
    assert computed(pair) == 12


async def test_same_root_only_a_prompt_of_another_salt_is_computed_whole(pair: Pair) -> None:
    await hand_over(pair, 1, PROMPT, (9, 2, 3))
    assert await hand_over(pair, 1001, PROMPT, (4, 5, 6), salt=1) == 0
    assert computed(pair) == 20
    assert await hand_over(pair, 2001, PROMPT, (7, 8, 9), salt=1) == 8


async def test_the_receiver_is_told_before_the_pages_are_made_known_here(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    put, keep = MemoryTransfer.put, Holdings.keep

    def posted(transfer: MemoryTransfer, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        order.append(region)
        return put(transfer, peer, region, runs)

    def kept(holdings: Holdings, room: RoomId, tokens: Sequence[int]) -> Holding:
        order.append("kept")
        return keep(holdings, room, tokens)

    monkeypatch.setattr(MemoryTransfer, "put", posted)
    monkeypatch.setattr(Holdings, "keep", kept)
    await hand_over(pair, 1, PROMPT, (9, 2, 3))
    assert order.index("slots") < order.index("kept")


async def test_what_the_receiver_holds_is_not_sent_though_the_sender_computes_it(pair: Pair) -> None:
    assert await hand_over(pair, 1, PROMPT, (3,), prefix=8) == 0
    assert computed(pair) == 10
    assert pair.bench.gauge("baton_kv_transfer_bytes_total") == toy.GROUP.page_bytes


@pytest.mark.parametrize("prefix", [0, 4, 8])
async def test_what_both_hold_is_neither_computed_nor_sent(pair: Pair, prefix: int) -> None:
    await hand_over(pair, 1, PROMPT, (9, 2, 3))
    before = pair.bench.gauge("baton_kv_transfer_bytes_total")
    assert await hand_over(pair, 1001, PROMPT, (4, 5, 6)[prefix // 4 :], prefix=prefix) == 8
    assert computed(pair) == 12
    sent = pair.bench.gauge("baton_kv_transfer_bytes_total") - before
    assert sent == (3 - prefix // 4) * toy.GROUP.page_bytes


async def test_zero_page_hand_over_of_a_prompt_that_the_receiver_holds_whole(pair: Pair) -> None:
    await hand_over(pair, 1, PROMPT[:8], (9, 2))
    before = pair.bench.gauge("baton_kv_transfer_bytes_total")
    assert await hand_over(pair, 1001, PROMPT[:8], (), prefix=8) == 4
    assert pair.bench.gauge("baton_kv_transfer_bytes_total") == before


async def test_promise_kept_a_prefix_longer_than_the_prompt_is_refused(pair: Pair) -> None:
    await pair.bench.run(toy.request("1", PROMPT))
    with pytest.raises(PeerFault, match="a prefix of 12 tokens does not end with a page of its 10"):
        await pair.bench.grant(1, (), prefix=12)
    await pair.bench.cancel(1)
    await settle(pair.bench)
    pair.bench.assert_empty()


async def test_what_a_failed_room_computed_is_not_kept_and_what_it_used_stays(pair: Pair) -> None:
    await hand_over(pair, 1, PROMPT, (9, 2, 3))
    await pair.bench.run(toy.request("1001", LONGER + LONGER))
    await pair.bench.grant(1001, (4, 5, 6, 7, 8, 10))
    await pair.bench.turn()
    assert pair.bench.holdings.prefixes.evictable == 0
    await pair.bench.cancel(1001)
    await settle(pair.bench)
    pair.bench.assert_empty()
    census = pair.bench.holdings.census()
    assert (census[PageState.CACHED], census[PageState.FREE]) == (2, PAGES - 2)


async def test_what_a_failed_step_was_computed_from_is_not_begun_with_while_its_room_still_writes(
    slow: Pair,
) -> None:
    """The retry comes when the failure was reported, before the writes have ended."""
    bench = slow.bench
    await hand_over(slow, 1, PROMPT, (9, 2, 3))
    caller = await bench.run(toy.request("1001", LONGER))
    bench.engine.broken = {1}
    bench.engine.hold()
    await bench.grant(1001, (4, 5, 6))
    await computing(bench)
    await bench.turn()
    bench.engine.go()
    await bench.step_end()
    await bench.turn()
    assert bench.work.roster.get(RoomId(1001)).phase is Phase.FAILED
    assert slow.fabric.puts_under_way > 0
    assert await caller.outcome() == "engine_failed"
    bench.engine.broken = set()
    retried = await bench.run(toy.request("2001", LONGER))
    await bench.grant(2001, (7, 8, 10), slot=1)
    await computing(bench)
    assert RoomId(1001) in bench.work.roster, "its writes have not ended"
    assert bench.holdings.get(RoomId(2001)).shared_tokens == 0
    await settle(bench)
    assert await retried.outcome() == ""
    assert retried.replies[1].first_token.cached_tokens == 0
    assert bench.engine.foreign == []
    bench.assert_empty()


async def test_the_oldest_prefix_is_given_up_for_a_prompt_that_needs_the_space(pair: Pair) -> None:
    await hand_over(pair, 1, PROMPT, (9, 2, 3))
    long = tuple(range(200, 200 + (PAGES - 1) * toy.PAGE_TOKENS))
    await hand_over(pair, 2, long, tuple(range(PAGES - 1)))
    assert len(pair.bench.holdings.prefixes) == PAGES, "one of the first is left"
    assert await hand_over(pair, 1001, PROMPT, (9, 2, 3)) == 4
