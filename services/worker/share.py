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
"""

import asyncio
from typing import Final

from services.runtime.arrivals import Arrivals
from services.runtime.clock import Clock

LULL_PART: Final = 4
"""The handlers are done when nothing has come for a fourth of what they may have: from one event to the next
that follows from it a library's threads take some ten microseconds, which is little beside a long turn."""


class Share:
    """Times are of `clock`'s host."""

    def __init__(self, clock: Clock, arrivals: Arrivals) -> None:
        self._clock = clock
        self._arrivals = arrivals
        self._began_us = clock.host_us()
        self._turned_us = self._began_us

    def turned(self) -> None:
        """A turn has ended after which the handlers have the loop, or may rest."""
        self._turned_us = self._clock.host_us()

    async def give(self) -> None:
        """Let the handlers have what is left of their share, if they have a use for it."""
        had_us = self._turned_us - self._began_us
        ends_us = self._turned_us + had_us
        await asyncio.sleep(0)
        while self._clock.host_us() < ends_us and self._arrivals.waiting(had_us // LULL_PART):  # noqa: ASYNC110
            await asyncio.sleep(0)
        self._began_us = self._clock.host_us()
