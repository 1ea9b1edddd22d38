"""Tests that an engine that computes no chunks gets local prompts whole, and no rooms of several choices."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.rooms.errors import Refusal
from tests.decode.bench import DecodeBench, decoding
from tests.decode.test_growth import asked
from tests.decode.test_local import LATE_MS, long
from tests.prefill import toy


@pytest.fixture
async def bench() -> AsyncIterator[DecodeBench]:
    async with decoding(pages=16, local_gap_ms=50) as made:
        made.work.ports.bounds = replace(made.work.ports.bounds, whole_prompts=True)
        yield made


async def test_a_local_prompt_is_one_row(bench: DecodeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token comes with the first step, however few tokens a step may compute."""
    monkeypatch.setattr("baton.decode.decode_scheduler.ALONE_TOKENS", 5)
    request = long(1)
    caller = await bench.stream(request, prefill_ms=LATE_MS)
    await bench.settle()
    assert await caller.outcome() == ""
    assert caller.tokens == toy.answer(request)
    assert bench.engine.steps == request.max_tokens
    bench.assert_empty()


async def test_a_room_of_several_choices_is_refused_by_name(bench: DecodeBench) -> None:
    with pytest.raises(Refusal, match="computes a prompt as a whole: a room has one choice"):
        await bench.stream(asked(1, 1, choices=2))
    bench.assert_empty()
