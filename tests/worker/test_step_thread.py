"""Tests that a turn never waits for a step of the model."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from baton.both.wiring import BorrowedThread
from baton.engine_interface import EngineLost, PageSumRequest, RankGroupBroken, Row, RowResult
from baton.engine_interface import Sequence as TokenSequence
from baton.ids import Incarnation
from baton.parallel.solo import SoloGroup
from baton.rooms.request import Request, Token
from baton.runtime.errors import EngineStuck
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.transfer.exposure import Exposure
from baton.transfer.transfer_protocol import TransferError
from baton.worker.step_thread import FAILED_MAX, StepFailed, StepThread
from baton.worker.wiring import end

WAIT_S = 10.0


class Held:
    """An engine whose steps end on command."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.fails: Exception | None = None
        self.released: list[TokenSequence] = []

    def bind_thread(self) -> None:
        self.bound = threading.current_thread()

    def step(self, rows: Sequence[Row]) -> list[RowResult]:
        self.stepped = threading.current_thread()
        if not self.let_go.wait(WAIT_S / 2):
            raise TimeoutError("nobody let the step go: whoever started it waits for its end")
        if self.fails is not None:
            raise self.fails
        return [(Token(7),)]

    def sum_pages(self, parts: Sequence[PageSumRequest]) -> None:
        self.step([])

    def release(self, sequence: TokenSequence) -> None:
        self.released.append(sequence)


class Bench:
    def __init__(self) -> None:
        self.engine = Held()
        self.done = asyncio.Event()
        self.step_thread = StepThread(self.engine, self.done.set)

    async def ended(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.done.wait()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.engine.let_go.set()
    made.step_thread.close()


async def test_no_blocking_a_step_is_started_and_asked_for_without_waiting(bench: Bench) -> None:
    bench.step_thread.start([])
    assert not bench.step_thread.free
    assert bench.step_thread.take() is None
    bench.engine.let_go.set()
    await bench.ended()
    assert bench.step_thread.take() == [(Token(7),)]
    assert bench.step_thread.free
    assert bench.step_thread.take() is None, "said once"


async def test_a_step_that_raised_says_so_once_and_the_next_one_runs(bench: Bench) -> None:
    bench.engine.fails = ValueError("out of memory")
    bench.engine.let_go.set()
    bench.step_thread.start([])
    await bench.ended()
    with pytest.raises(StepFailed, match="ValueError: out of memory"):
        bench.step_thread.take()
    bench.engine.fails = None
    bench.done.clear()
    bench.step_thread.start([])
    await bench.ended()
    assert bench.step_thread.take() == [(Token(7),)]


async def run(bench: Bench, fails: Exception | None) -> None:
    bench.engine.fails = fails
    bench.engine.let_go.set()
    bench.done.clear()
    bench.step_thread.start([])
    await bench.ended()


async def test_honest_health_an_engine_that_fails_every_step_is_lost(bench: Bench) -> None:
    async def fail_often() -> None:
        for _ in range(FAILED_MAX - 1):
            await run(bench, ValueError("no"))
            with pytest.raises(StepFailed):
                bench.step_thread.take()

    await fail_often()
    await run(bench, None)
    assert bench.step_thread.take() == [(Token(7),)]
    await fail_often()
    await run(bench, ValueError("no"))
    with pytest.raises(EngineLost, match=f"{FAILED_MAX} steps in a row failed, the last by ValueError: no"):
        bench.step_thread.take()


async def test_an_engine_that_says_so_is_lost_at_once(bench: Bench) -> None:
    await run(bench, EngineLost("an illegal memory access was encountered"))
    with pytest.raises(EngineLost, match="illegal memory access"):
        bench.step_thread.take()


async def test_the_thread_that_makes_steps_is_bound_before_the_first(bench: Bench) -> None:
    await run(bench, None)
    assert bench.engine.bound is bench.engine.stepped


async def test_one_step_at_a_time(bench: Bench) -> None:
    bench.step_thread.start([])
    with pytest.raises(RuntimeError, match="a step is running"):
        bench.step_thread.start([])


@pytest.mark.parametrize("summing", [False, True])
async def test_a_broken_team_is_no_failed_step(bench: Bench, summing: bool) -> None:
    """Other ranks may not have the error, so the worker ends and the error is passed on unchanged."""
    bench.engine.fails = RankGroupBroken("rank 1 of 2: left")
    bench.engine.let_go.set()
    (bench.step_thread.start_sum if summing else bench.step_thread.start)([])
    await bench.ended()
    with pytest.raises(RankGroupBroken, match="rank 1 of 2: left"):
        bench.step_thread.take_sum() if summing else bench.step_thread.take()


async def test_a_step_that_runs_is_waited_for_at_the_end_and_one_that_hangs_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.step_thread.end()
    hung = Bench()
    monkeypatch.setattr("baton.worker.step_thread.END_S", 0.05)
    hung.step_thread.start([])
    with pytest.raises(EngineStuck, match="a step of the model has not ended"):
        await hung.step_thread.end()
    hung.engine.let_go.set()
    await hung.step_thread.end()


async def test_others_learn_that_a_worker_ends_before_its_step_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers learn of it also when the step hangs, so none waits for an answer that will not come."""
    monkeypatch.setattr("baton.worker.step_thread.END_S", 0.05)
    exposure = Exposure(partial(MemoryTransfer, MemoryFabric()), lambda: Incarnation(1), {})
    learnt: list[str] = []

    async def leave() -> None:
        learnt.append("peers")

    class Group(SoloGroup):
        async def close(self) -> None:
            learnt.append("ranks")

    bench.step_thread.start([])
    with pytest.raises(EngineStuck):
        await end(Group(), leave, bench.step_thread, exposure)
    assert learnt == ["ranks", "peers"]
    bench.engine.let_go.set()
    await end(Group(), leave, bench.step_thread, exposure)
    with pytest.raises(TransferError, match="closed"):
        exposure.endpoint()


async def test_close_leaves_a_stuck_step_to_itself_if_it_is_told_to(bench: Bench) -> None:
    bench.step_thread.start([])
    bench.step_thread.close(wait=False)
    assert not bench.engine.let_go.is_set(), "nobody waited: else it would have failed after a while"
    assert not bench.done.is_set()


class Watch:
    """A clock that shows the time it is set to, in microseconds."""

    now_us = 0

    def host_us(self) -> int:
        return self.now_us

    def now_ms(self) -> int:
        return self.now_us // 1000

    def wall_ms(self) -> int:
        return self.now_us // 1000


async def test_two_sides_of_a_process_take_turns_and_each_knows_how_long_it_waited() -> None:
    watch, one, other = Watch(), Held(), Held()
    with ThreadPoolExecutor(1) as pool:
        done = asyncio.Event()
        first = StepThread(one, lambda: None, BorrowedThread(pool), watch)
        second = StepThread(other, done.set, BorrowedThread(pool), watch)
        first.start([])
        second.start([])
        watch.now_us = 700
        assert second.take() is None
        one.let_go.set()
        other.let_go.set()
        async with asyncio.timeout(WAIT_S):
            await done.wait()
        assert (first.waited_us, second.waited_us) == (0, 700)
        assert one.stepped is other.stepped
        assert [first.take(), second.take()] == [[(Token(7),)]] * 2


async def test_a_side_that_ends_leaves_the_thread_to_the_other() -> None:
    one, other = Held(), Held()
    with ThreadPoolExecutor(1) as pool:
        done = asyncio.Event()
        first = StepThread(one, lambda: None, BorrowedThread(pool))
        second = StepThread(other, done.set, BorrowedThread(pool))
        await first.end()
        other.let_go.set()
        second.start([])
        async with asyncio.timeout(WAIT_S):
            await done.wait()
        assert second.take() == [(Token(7),)]


def row_of(name: str) -> Row:
    return Row(TokenSequence(Request(name, (1, 2), 1), []), 0, 2, ((0,),), sample=True)


async def test_each_is_released_once_and_not_while_its_row_is_computed(bench: Bench) -> None:
    first, second, unseen = row_of("first"), row_of("second"), row_of("unseen")
    bench.engine.let_go.set()
    bench.step_thread.start([first])
    await bench.ended()
    assert bench.step_thread.take() is not None
    bench.engine.let_go.clear()
    bench.step_thread.start([second])
    for row in (first, second, unseen):
        bench.step_thread.release(row.sequence)
        bench.step_thread.release(row.sequence)
    assert bench.engine.released == [first.sequence], "no step had a row of the last one"
    bench.done.clear()
    bench.engine.let_go.set()
    await bench.ended()
    assert bench.step_thread.take() is not None
    bench.step_thread.release(second.sequence)
    assert bench.engine.released == [first.sequence, second.sequence]


async def test_each_is_released_also_after_a_step_that_failed(bench: Bench) -> None:
    row = row_of("mine")
    bench.engine.fails = RuntimeError("as a library may")
    bench.step_thread.start([row])
    bench.step_thread.release(row.sequence)
    bench.engine.let_go.set()
    await bench.ended()
    with pytest.raises(StepFailed):
        bench.step_thread.take()
    assert bench.engine.released == [row.sequence]
