"""Sharing of one event loop between a worker's turns and its gRPC handlers.

A turn has the loop for as long as it takes. Meanwhile calls arrive, streams bring messages, and sent messages
are taken. Each such event needs several rounds of the loop, and the threads of the gRPC library in between.
So after a turn the handlers have the loop until nothing waits for it, and at most for as long as turns have
had it since the handlers' last share. This is fair to both:

* An event waits for the turn during which it arrived, and not for as many turns as it takes rounds
  (`live-is-not-lost`). It waits longer only if earlier events fill the handlers' whole share.
* Endless handlers take half of the loop. Turns then go on at half their pace (`no-starvation`).
* Without events, a turn is followed by one round of the loop and one look, which takes microseconds.

The share is measured in time, not in rounds, because rounds differ in length. While a turn waits for other
ranks, the handlers have the loop, so that time does not count as the turn's (`TimedGroup`). Otherwise a
pause of one rank for ten seconds would be followed by ten seconds without tokens. No share is longer than
SHARE_MAX_US, because a process that was itself stopped measures a long turn (`stall-is-no-work`).
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

from baton.parallel.rank_group import RankGroup
from baton.runtime.clock import Clock
from baton.worker.pending_events import PendingEvents

LULL_PART: Final = 4
"""Divisor of the time for which gRPC handlers have the event loop after a turn. Their time ends early if no
event comes during a fourth of it.

The threads of the gRPC library take some ten microseconds from one event to the next, which is short compared
with a long turn.
"""
SHARE_MAX_US: Final = 100_000
"""Longest time in microseconds for which gRPC handlers get the event loop after a turn. A turn takes a few
milliseconds of the loop."""

T = TypeVar("T")


class TimedGroup:
    """Wrapper of a rank group (`RankGroup`) that measures how long its rank waits for the other ranks."""

    def __init__(self, group: RankGroup, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self.rank = group.rank
        self.size = group.size
        self.waited_us = 0
        """Microseconds that this rank has waited in calls of the group since the start."""

    @property
    def broken(self) -> str | None:
        return self._group.broken

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        return await self._timed(self._group.agree(ballot))

    async def broadcast(self, commands: bytes | None) -> bytes:
        return await self._timed(self._group.broadcast(commands))

    async def gather(self, data: bytes) -> list[bytes]:
        return await self._timed(self._group.gather(data))

    async def close(self) -> None:
        await self._group.close()

    async def _timed(self, call: Awaitable[T]) -> T:
        began_us = self._clock.host_us()
        try:
            return await call
        finally:
            self.waited_us += self._clock.host_us() - began_us


class LoopShare:
    """Limit on the time for which gRPC handlers get the event loop after a turn: as long as the turns before
    had it."""

    def __init__(self, clock: Clock, arrivals: PendingEvents, group: TimedGroup) -> None:
        """Make the limit for one worker's loop. `arrivals`: events that wait for the loop. `group`: rank
        group of the turns. The time that it waits for other ranks does not count as time of the turns."""
        self._clock = clock
        self._arrivals = arrivals
        self._group = group
        self._began_us = self._turned_us = clock.host_us()
        self._waited_us = group.waited_us
        """Value of `group.waited_us`, in microseconds, when the handlers last gave the event loop back."""

    def turned(self) -> None:
        """Record that a turn has ended, so that the gRPC handlers may run next."""
        self._turned_us = self._clock.host_us()

    async def give(self) -> None:
        """Let the gRPC handlers run until no event waits for them, or they have had the event loop for as
        long as they may."""
        waited_us = self._group.waited_us - self._waited_us
        had_us = min(self._turned_us - self._began_us - waited_us, SHARE_MAX_US)
        ends_us = self._turned_us + had_us
        await asyncio.sleep(0)
        while self._clock.host_us() < ends_us and self._arrivals.waiting(had_us // LULL_PART):  # noqa: ASYNC110
            await asyncio.sleep(0)
        self._began_us, self._waited_us = self._clock.host_us(), self._group.waited_us
