"""Does a turn ever wait for a step of the model?"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from services.engine.rows import Row, SumPart
from services.engine.stepper import StepFailed, Stepper
from services.rooms.request import Token

WAIT_S = 10.0


class Held:
    """An engine whose steps end when they are told to."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.fails = False

    def step(self, rows: Sequence[Row]) -> list[Token | None]:
        if not self.let_go.wait(WAIT_S / 2):
            raise TimeoutError("nobody let the step go: whoever started it waits for its end")
        if self.fails:
            raise ValueError("out of memory")
        return [Token(7)]

    def sum_pages(self, parts: Sequence[SumPart]) -> None:
        self.step([])


class Bench:
    def __init__(self) -> None:
        self.engine = Held()
        self.done = asyncio.Event()
        self.stepper = Stepper(self.engine, self.done.set)

    async def ended(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.done.wait()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.engine.let_go.set()
    made.stepper.close()


async def test_no_blocking_a_step_is_started_and_asked_for_without_waiting(bench: Bench) -> None:
    bench.stepper.start([])
    assert not bench.stepper.free
    assert bench.stepper.take() is None
    bench.engine.let_go.set()
    await bench.ended()
    assert bench.stepper.take() == [Token(7)]
    assert bench.stepper.free
    assert bench.stepper.take() is None, "said once"


async def test_a_step_that_raised_says_so_once_and_the_next_one_runs(bench: Bench) -> None:
    bench.engine.fails = True
    bench.engine.let_go.set()
    bench.stepper.start([])
    await bench.ended()
    with pytest.raises(StepFailed, match="ValueError: out of memory"):
        bench.stepper.take()
    bench.engine.fails = False
    bench.done.clear()
    bench.stepper.start([])
    await bench.ended()
    assert bench.stepper.take() == [Token(7)]


async def test_one_step_at_a_time(bench: Bench) -> None:
    bench.stepper.start([])
    with pytest.raises(RuntimeError, match="a step is running"):
        bench.stepper.start([])
