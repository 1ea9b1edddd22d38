"""Tests that a prompt waits for the grammar of its answer before its first token, and delays no other
prompt."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.grammars.grammar_cache import GrammarCache
from tests.grammars.answers import Slow, regex
from tests.patience import PATIENCE_S
from tests.prefill import toy
from tests.prefill.bench import DEADLINE_MS
from tests.prefill.test_turn import GRANTED, PROMPT, Pair, settle

HELD = toy.request("1", PROMPT, grammar=regex("[0-9]"))


@pytest.fixture
async def pair(slow: Slow) -> AsyncIterator[Pair]:
    made = Pair(grammars=GrammarCache(slow))
    yield made
    made.bench.close()


async def test_a_prompt_is_computed_when_its_grammar_is_compiled_and_others_before(
    pair: Pair, slow: Slow
) -> None:
    bench = pair.bench
    held = await bench.run(HELD)
    await bench.grant(1, GRANTED, slot=1)
    free = await bench.run(toy.request("2", PROMPT[:3]))
    await bench.grant(2, (4,), slot=2)
    async with asyncio.timeout(PATIENCE_S):
        while not free.task.done():
            if not bench.step_thread.free:
                await bench.step_end()
            await bench.turn()
    assert held.heard == ["accepted"]
    bench.mailbox.news.clear()
    slow.go.set()
    assert await bench.mailbox.news.wait(PATIENCE_S)
    await settle(bench)
    assert await held.outcome() == ""
    assert held.heard == ["accepted", "first_token", "outcome"]
    bench.assert_empty()


async def test_a_grammar_that_is_not_compiled_in_time_ends_its_room(pair: Pair) -> None:
    bench = pair.bench
    held = await bench.run(HELD)
    await bench.grant(1, GRANTED, slot=1)
    bench.clock.advance(DEADLINE_MS + 1)
    await settle(bench)
    assert await held.outcome() == "deadline"
    assert bench.engine.steps == 0
    bench.assert_empty()
