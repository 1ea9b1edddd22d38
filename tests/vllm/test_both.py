"""Tests of the two engines of a process that serves both sides: one model, two memories."""

from typing import Any

import pytest

from baton.engine_interface import Row, Sequence
from baton.rooms.request import Request
from tests.vllm.conftest import TOKENS, settings
from tests.vllm.driving import GREEDY


@pytest.fixture(scope="module")
def engines() -> tuple[Any, Any]:
    from baton.vllm.engine_startup import start_both

    return start_both(settings("demo", kv_cache_memory=128 << 20), 1)


def test_steps_in_turns_and_moves(
    engines: tuple[Any, Any], prompts: list[list[int]], alone: list[list[int]]
) -> None:
    chosen = (3, 6)
    sequences = [
        Sequence(Request("mine", tuple(prompts[each]), TOKENS, sampling=GREEDY), []) for each in chosen
    ]
    for number in range(TOKENS):
        for engine, sequence in zip(engines, sequences, strict=True):
            start = sequence.length - 1 if number else 0
            [taken] = engine.step([Row(sequence, start, sequence.length, (range(6),), sample=True)])
            assert isinstance(taken, tuple)
            sequence.output.append(taken[0].id)
        engines[number % 2].cache.move()
    assert [each.output for each in sequences] == [alone[each] for each in chosen]
