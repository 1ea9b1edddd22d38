"""Is whoever is turned away served, if it comes back when it is told to?"""

import asyncio
from collections import Counter
from heapq import heappop, heappush
from itertools import count

import pytest

from services.bootstrap.asked import NotInTime, QueueFull
from services.ids import RoomId
from services.rooms.registry_records import RoomEntry
from tests.bootstrap.scripted import House, house

TICK_MS = 100
"""A room is answered with each."""


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
