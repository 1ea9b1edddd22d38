"""Tests that an engine that computes no chunks gets each prompt whole, and no request that needs parts."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.rooms.errors import Refusal
from tests.prefill import toy
from tests.prefill.test_turn import Pair, settle

PROMPT = tuple(range(100, 121))
PAGES = (9, 2, 3, 4, 5, 6), (7, 8, 10, 11, 12, 13)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair(chunk_tokens=8)
    ports = made.bench.work.ports
    ports.bounds = replace(ports.bounds, whole_prompts=True)
    yield made
    made.bench.close()


async def test_each_prompt_is_one_step_alone_whatever_the_budget(pair: Pair) -> None:
    bench = pair.bench
    bench.engine.hold()
    callers = []
    for room, pages in enumerate(PAGES, 1):
        callers.append(await bench.run(toy.request(str(room), PROMPT)))
        await bench.grant(room, pages, slot=room)
    bench.engine.go()
    await settle(bench)
    assert [await caller.outcome() for caller in callers] == ["", ""]
    assert bench.engine.steps == 2
    bench.assert_empty()


async def test_a_prompt_that_is_to_be_scored_is_refused_by_name(pair: Pair) -> None:
    with pytest.raises(Refusal, match="computes a prompt as a whole: it scores none"):
        await pair.bench.run(toy.request("1", PROMPT, prompt_logprobs=1))
    pair.bench.assert_empty()
