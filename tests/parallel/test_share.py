"""Tests that turns and request handlers each get their share of a busy event loop. Time is simulated: each
turn and each round of a handler takes some of it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest
import uvloop

from baton.parallel.rank_group import RankGroup
from baton.parallel.solo import SoloGroup
from baton.runtime.clock import SystemClock
from baton.worker.loop_share import SHARE_MAX_US, TimedGroup
from baton.worker.pending_events import SystemPendingEvents
from baton.worker.turn_loop import TurnProgress, run_turns
from tests.parallel.test_dimensions import RoomsOnly
from tests.patience import PATIENCE_S

TURN_US = 3_000
ROUND_US = 20
HANDLERS = 100
STOP_US = 10_000_000


class Time:
    """Passes where something is done. `baton.runtime.clock.Clock`."""

    def __init__(self) -> None:
        self.us = 0

    def now_ms(self) -> int:
        return self.us // 1_000

    def wall_ms(self) -> int:
        return self.us // 1_000

    def host_us(self) -> int:
        return self.us


class Busy(RoomsOnly):
    """A worker whose every turn has something to see."""

    def __init__(self, time: Time, turn_us: int = TURN_US) -> None:
        super().__init__()
        self._time = time
        self._turn_us = turn_us
        self.turns = 0
        self.enough = asyncio.Event()
        self.turns_most = 10**9
        self.stop_us = 0
        """Microseconds for which this process stands still in its next turn."""

    def observe(self) -> bool:
        self.turns += 1
        self._time.us += self._turn_us + self.stop_us
        self.stop_us = 0
        if self.turns >= self.turns_most:
            self.enough.set()
        return True


class Handlers:
    """`baton.worker.pending_events.PendingEvents`: what they have to do yet waits."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.left = 0
        self.rounds = 0

    async def handle(self, rounds: int) -> None:
        self.left += 1
        for _ in range(rounds):
            await asyncio.sleep(0)
            self._time.us += ROUND_US
            self.rounds += 1
        self.left -= 1

    def waiting(self, lull_us: int) -> bool:
        return self.left > 0

    def came(self) -> None: ...


class StoppedRank(SoloGroup):
    """A group of which another rank stands still in the first agreement."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time
        self._stops = True

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        if self._stops:
            self._stops = False
            self._time.us += STOP_US
        return await super().agree(ballot)


async def turning(
    work: Busy,
    time: Time,
    handlers: Handlers,
    until: Callable[[], Awaitable[object]],
    group: RankGroup,
) -> None:
    turns = asyncio.create_task(run_turns(work, group, time, TurnProgress(time), handlers))
    async with asyncio.timeout(PATIENCE_S):
        await until()
    turns.cancel()
    with suppress(asyncio.CancelledError):
        await turns


@pytest.mark.parametrize("rounds", [1, 3, 30, 300])
async def test_live_is_not_lost_handlers_end_within_as_many_turns_as_their_work_is_long(rounds: int) -> None:
    time = Time()
    work, handlers = Busy(time), Handlers(time)

    async def all_end() -> None:
        await asyncio.gather(*(handlers.handle(rounds) for _ in range(HANDLERS)))

    await turning(work, time, handlers, all_end, SoloGroup())
    assert work.turns <= 4 + HANDLERS * rounds * ROUND_US / TURN_US, "and not one turn for each round"


async def test_no_starvation_turns_go_on_at_half_their_pace_beside_handlers_without_end() -> None:
    time = Time()
    work, handlers = Busy(time), Handlers(time)
    work.turns_most = 50
    endless = [asyncio.create_task(handlers.handle(10**9)) for _ in range(HANDLERS)]
    await turning(work, time, handlers, work.enough.wait, SoloGroup())
    for each in endless:
        each.cancel()
    await asyncio.gather(*endless, return_exceptions=True)
    a_round_of_all = HANDLERS * ROUND_US
    assert time.us <= work.turns * (2 * TURN_US + a_round_of_all)
    assert handlers.rounds * ROUND_US >= (work.turns - 1) * TURN_US, "the other half is theirs"


@pytest.mark.parametrize("stopped", ["another rank", "this process"])
async def test_stall_is_no_work_a_stop_of_ten_seconds_gives_handlers_no_ten_seconds_behind_it(
    stopped: str,
) -> None:
    time = Time()
    work, handlers = Busy(time), Handlers(time)
    work.turns_most = 4
    group = StoppedRank(time) if stopped == "another rank" else SoloGroup()
    work.stop_us = STOP_US if stopped == "this process" else 0
    endless = [asyncio.create_task(handlers.handle(10**9)) for _ in range(HANDLERS)]
    await turning(work, time, handlers, work.enough.wait, group)
    for each in endless:
        each.cancel()
    await asyncio.gather(*endless, return_exceptions=True)
    a_round_of_all = HANDLERS * ROUND_US
    most_us = work.turns * (TURN_US + a_round_of_all)
    if stopped == "this process":
        most_us += SHARE_MAX_US
    assert handlers.rounds * ROUND_US <= most_us


async def test_a_turn_that_waits_for_another_rank_is_no_longer_than_what_it_does_itself() -> None:
    time = Time()
    group = TimedGroup(StoppedRank(time), time)
    await group.agree([1])
    time.us += TURN_US
    await group.agree([1])
    assert group.waited_us == STOP_US


async def test_where_nothing_waits_a_turn_follows_the_next_after_one_round() -> None:
    time, rounds = Time(), 0
    work, handlers = Busy(time), Handlers(time)
    work.turns_most = 20

    async def count() -> None:
        nonlocal rounds
        while not work.enough.is_set():
            rounds += 1
            await asyncio.sleep(0)

    await turning(work, time, handlers, count, SoloGroup())
    assert rounds == pytest.approx(work.turns, abs=2)


def test_what_has_come_waits_until_the_loop_has_taken_it_and_a_lull_behind_it() -> None:
    """The test uses the event loop that workers run on."""

    async def call() -> None:
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        arrivals = SystemPendingEvents(loop, SystemClock())
        here, caller = await _connected(heard)
        assert not arrivals.waiting(10**9)
        caller.write(b"x")
        async with asyncio.timeout(PATIENCE_S):
            while not arrivals.waiting(0):
                pass  # it lies with the system: the loop has had no round since
        assert not heard.is_set()
        await heard.wait()
        await asyncio.sleep(0)
        assert not arrivals.waiting(0)
        assert arrivals.waiting(10**9), "something may follow"
        for each in (here, caller):
            each.close()

    uvloop.run(call())


async def _connected(heard: asyncio.Event) -> tuple[asyncio.BaseTransport, asyncio.WriteTransport]:
    """Both ends of a connection, of which one says that it has heard something."""

    class Hearer(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            heard.set()

    loop = asyncio.get_running_loop()
    one, other = socket.socketpair()
    here, _ = await loop.create_connection(Hearer, sock=one)
    there, _ = await loop.create_connection(asyncio.Protocol, sock=other)
    return here, there
