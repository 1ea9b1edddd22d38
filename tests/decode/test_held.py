"""Tests of rooms whose pages have landed while their grammar is still being compiled."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.grammars.grammar_cache import GrammarCache
from baton.rooms.phases import Phase
from tests.decode.bench import DecodeBench, decoding
from tests.decode.test_turn import ASKED, started
from tests.grammars.answers import Slow, regex
from tests.patience import PATIENCE_S
from tests.prefill import toy

HELD = replace(ASKED, grammar=regex("[0-9]"))


@pytest.fixture
async def bench(slow: Slow) -> AsyncIterator[DecodeBench]:
    async with decoding(grammars=GrammarCache(slow)) as made:
        yield made


async def test_a_room_is_granted_at_once_and_admitted_when_its_grammar_is_compiled(
    bench: DecodeBench, slow: Slow
) -> None:
    caller = await started(bench, HELD)
    bench.land(HELD)
    await bench.turns(5)
    assert bench.phase(1) is Phase.TRANSFERRING
    assert caller.tokens == []
    bench.mailbox.news.clear()
    slow.go.set()
    assert await bench.mailbox.news.wait(PATIENCE_S)
    await bench.settle()
    assert await caller.outcome() == ""
    assert caller.tokens == toy.answer(ASKED)
    bench.assert_empty()


async def test_a_room_that_is_cancelled_meanwhile_waits_for_nothing(bench: DecodeBench, slow: Slow) -> None:
    caller = await started(bench, HELD)
    bench.sender.quiet.set()
    await bench.cancel(1)
    await bench.settle()
    assert await caller.outcome() == "cancelled"
    slow.go.set()
    await bench.turns(3)
    bench.assert_empty()
