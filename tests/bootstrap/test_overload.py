"""Tests of overload: a refused client that comes back when it was told to is served."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import pytest

from baton.bootstrap.admission.placement_request import NotInTime, QueueFull
from baton.fleet.room_entry import RoomEntry
from baton.ids import RoomId
from tests.bootstrap.scripted import House, house

TICK_MS = 100
"""Time in which the stack answers one room, ms."""


async def turns(times: int = 1) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


class Overload:
    """A stack that serves a room each TICK_MS, and clients that come again when they are told to."""

    def __init__(self, at: House) -> None:
        self.at = at
        self.tries: Counter[str] = Counter()
        self.served: list[str] = []
        self._numbers = count()
        self._coming: list[tuple[int, int, str, int]] = []
        self._rooms: list[int] = []
        self._asking: set[asyncio.Task[None]] = set()

    def come(self, name: str, at_ms: int, priority: int = 0) -> None:
        heappush(self._coming, (at_ms, next(self._numbers), name, priority))

    async def tick(self) -> None:
        now_ms = self.at.clock.now_ms()
        while self._coming and self._coming[0][0] <= now_ms:
            _, _, name, priority = heappop(self._coming)
            self._asking.add(asyncio.ensure_future(self._ask(name, priority)))
            await turns(2)
        self.at.clock.advance(TICK_MS)
        if self._rooms:
            room = self._rooms.pop(0)
            self.at.rooms.answered(RoomId(room))
            self.at.retired(room)
        await turns(4)
        self._asking = {each for each in self._asking if not each.done()}

    async def until_all_are_served(self, ticks_max: int) -> None:
        for _ in range(ticks_max):
            await self.tick()
            if not self._coming and not self._asking and not self._rooms:
                return
        raise AssertionError(f"{len(self._coming)} are still told to come again")

    async def _ask(self, name: str, priority: int) -> None:
        self.tries[name] += 1
        try:
            entry: RoomEntry = await self.at.admission.admit(name, 3, 5, priority=priority)
        except QueueFull:
            after_ms = 1000 * self.at.admission.retry_after_s(priority)
            self.come(name, self.at.clock.now_ms() + after_ms, priority)
        else:
            self.served.append(name)
            self._rooms.append(entry.id)


async def test_in_a_crowd_all_who_come_again_when_they_are_told_to_are_served() -> None:
    async with house(max_queue=20, places=2) as at:
        crowd = Overload(at)
        for each in range(200):
            crowd.come(f"{each}", at.clock.now_ms())
        await crowd.until_all_are_served(250)
        assert len(crowd.served) == 200
        measured = [tries for name, tries in crowd.tries.items() if int(name) >= 22]
        assert max(measured) <= 5, "twice before anything is measured, and then for a place"
        assert at.admission.queued() == 0


async def test_who_comes_again_is_served_also_while_twice_as_many_come_as_can_be_served() -> None:
    async with house(max_queue=20, places=2) as at:
        crowd = Overload(at)
        for each in range(400):
            crowd.come(f"{each}", at.clock.now_ms() + each * TICK_MS // 2)
        await crowd.until_all_are_served(600)
        assert len(crowd.served) == 400
        assert max(crowd.tries.values()) <= 9


async def test_of_two_classes_each_that_comes_again_is_served() -> None:
    async with house(max_queue=10, places=2) as at:
        crowd = Overload(at)
        for each in range(150):
            crowd.come(f"{each % 3 == 0}-{each}", at.clock.now_ms() + each * TICK_MS // 2, int(each % 3 == 0))
        await crowd.until_all_are_served(1_000)
        assert len(crowd.served) == 150
        assert max(crowd.tries.values()) <= 9


async def test_who_would_wait_for_longer_than_it_may_is_turned_away_and_whoever_would_not_is_not() -> None:
    async with house(max_queue=90, places=2, max_wait_ms=2_000) as at:
        crowd = Overload(at)
        for each in range(60):
            crowd.come(f"{each}", at.clock.now_ms())
        for _ in range(30):
            await crowd.tick()
        assert at.admission.queued() == 28
        with pytest.raises(NotInTime, match=r"it would wait 2\.9 s for workers: 28 requests before it"):
            await at.admission.admit("late", 3, 5)
        assert at.admission.retry_after_s() == 1
        for _ in range(10):
            await crowd.tick()
        crowd.come("in time", at.clock.now_ms())
        await crowd.until_all_are_served(30)
        assert crowd.tries["in time"] == 1


CAPACITY = 8
OVERLOAD_MS = 300_000
QUEUE_TIMEOUT_MS = 60_000


class Refused(NamedTuple):
    at_ms: int
    after_ms: int
    """Time from the request's arrival to its refusal, ms."""
    told_ms: int
    """Time after which the refusal told the client to retry, ms."""


class TokenStack(Overload):
    """A stack that draws a token of each room with each tick. Clients that are turned away stay away."""

    def __init__(self, at: House, lengths: Sequence[int]) -> None:
        """`lengths`: tokens that requests draw, in turn."""
        super().__init__(at)
        self.refused: list[Refused] = []
        self.waited_ms: list[int] = []
        self._lengths = lengths
        self._left: dict[int, int] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._coming or self.at.admission.queued() or self._left)

    async def tick(self) -> None:
        await super().tick()
        for room in list(self._left):
            self.at.admission.expected.progressed(RoomId(room), 1)
            self._left[room] -= 1
            if not self._left[room]:
                del self._left[room]
                self.at.rooms.answered(RoomId(room))
                self.at.retired(room)
        self.at.admission.wake()
        await turns(4)

    async def _ask(self, name: str, priority: int) -> None:
        tokens = self._lengths[int(name) % len(self._lengths)]
        came_ms = self.at.clock.now_ms()
        try:
            entry = await self.at.admission.admit(name, 3, 3 + tokens, priority=priority)
        except QueueFull:
            after_ms = 1000 * self.at.admission.retry_after_s(priority)
            now_ms = self.at.clock.now_ms()
            self.refused.append(Refused(now_ms, now_ms - came_ms, after_ms))
        else:
            self.waited_ms.append(self.at.clock.now_ms() - came_ms)
            self._left[entry.id] = tokens


@pytest.mark.parametrize(
    "lengths", [(8, 64, 400), (250,), (8,)], ids=["mixed", "none ends before the line is long", "short"]
)
async def test_at_twice_what_is_sustained_refusals_come_at_once_and_say_when_to_come_back(
    lengths: tuple[int, ...],
) -> None:
    async with house(max_queue=1_000, places=CAPACITY) as at:
        stack = TokenStack(at, lengths)
        each_ms = TICK_MS * sum(lengths) / len(lengths) / CAPACITY / 2
        came = round(OVERLOAD_MS / each_ms)
        for number in range(came):
            stack.come(str(number), at.clock.now_ms() + round(number * each_ms))
        while stack.is_busy:
            await stack.tick()
        idle_ms = at.clock.now_ms()
        assert len(stack.waited_ms) + len(stack.refused) == came
        assert len(stack.refused) > came / 8
        at_once = [each.after_ms <= 2_000 for each in stack.refused]
        assert sum(at_once) >= 0.95 * len(at_once)
        assert max(stack.waited_ms) <= QUEUE_TIMEOUT_MS, "whoever is taken into the line is served in time"
        assert all(each.told_ms <= 3 * (idle_ms - each.at_ms) for each in stack.refused)
