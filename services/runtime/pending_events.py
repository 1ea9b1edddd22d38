"""Does anything from outside wait for this process's event loop?

A round of the loop asks the system what has come, and runs what waits for that. What has come since lies with
the system until the next round: a selector that has something ready is itself ready, as a look at it shows.
"""

import asyncio
import select
from typing import Any, Protocol

from baton.runtime.clock import Clock


class PendingEvents(Protocol):
    """What has come for one event loop."""

    def waiting(self, lull_us: int) -> bool:
        """Whether something has come that the loop has not dealt with, or did so less than `lull_us`
        microseconds ago: what a library's own threads make of it comes a little later."""

    def came(self) -> None:
        """Something did, just now, as somebody else has noticed."""


class SystemPendingEvents:
    """Those of a loop of uvloop. Used from within it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._clock = clock
        self._came_us: int | None = None
        uvloop: Any = loop
        self._selector = select.poll()
        self._selector.register(uvloop._get_backend_id(), select.POLLIN)

    def waiting(self, lull_us: int) -> bool:
        if self._selector.poll(0):
            self.came()
            return True
        return self._came_us is not None and self._clock.host_us() - self._came_us < lull_us

    def came(self) -> None:
        self._came_us = self._clock.host_us()
