"""How do a worker's turns and its handlers share one event loop?

A turn keeps the loop for as long as it takes. Meanwhile calls come in, streams bring messages, and what was
sent is taken: each needs several rounds of the loop, and the gRPC library's threads between them. So after a
turn the handlers have the loop until nothing waits for it, and no longer than turns have had it since the
handlers had it last. That is fair to both:

* What has come waits for the turn that it came in, and not for as many turns as it takes rounds
  (`live-is-not-lost`). It waits for more only where what came before it fills the handlers' whole share.
* Handlers without end take half of the loop, and no more: turns go on at half their pace (`no-starvation`).
* Where nothing has come, a turn is followed by one round of the loop and one look: some microseconds.

Time is measured and rounds are not counted: what a round takes depends on who has something to do in it.

While a turn waits for other ranks, the handlers have the loop: that time is not the turn's (`TimedGroup`). A
rank that is stopped for ten seconds would otherwise be followed by ten seconds of handlers, and no token. No
share is longer than SHARE_MAX_US: a process that was itself stopped measures a long turn, too
(`stall-is-no-work`).
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

from baton.parallel.rank_group import RankGroup
from baton.runtime.clock import Clock
from baton.runtime.pending_events import PendingEvents

LULL_PART: Final = 4
"""The handlers are done when nothing has come for a fourth of what they may have: from one event to the next
that follows from it a library's threads take some ten microseconds, which is little beside a long turn."""
SHARE_MAX_US: Final = 100_000
"""Longest share of the handlers, in microseconds. A turn takes a few milliseconds of the loop."""

T = TypeVar("T")


class TimedGroup:
    """A `RankGroup` that measures how long its rank waits for the others."""

    def __init__(self, group: RankGroup, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self.rank = group.rank
        self.size = group.size
        self.waited_us = 0
        """Microseconds that all calls took so far."""

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
    """Times are of `clock`'s host."""

    def __init__(self, clock: Clock, arrivals: PendingEvents, group: TimedGroup) -> None:
        """`group`: what the turns call, whose waits are not the turns' time."""
        self._clock = clock
        self._arrivals = arrivals
        self._group = group
        self._began_us = self._turned_us = clock.host_us()
        self._waited_us = group.waited_us
        """Waits for other ranks before the turns that count for the next share."""

    def turned(self) -> None:
        """A turn has ended after which the handlers have the loop, or may rest."""
        self._turned_us = self._clock.host_us()

    async def give(self) -> None:
        """Let the handlers have what is left of their share, if they have a use for it."""
        waited_us = self._group.waited_us - self._waited_us
        had_us = min(self._turned_us - self._began_us - waited_us, SHARE_MAX_US)
        ends_us = self._turned_us + had_us
        await asyncio.sleep(0)
        while self._clock.host_us() < ends_us and self._arrivals.waiting(had_us // LULL_PART):  # noqa: ASYNC110
            await asyncio.sleep(0)
        self._began_us, self._waited_us = self._clock.host_us(), self._group.waited_us
