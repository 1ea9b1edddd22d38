"""Detection of I/O events that wait for this process's event loop.

A round of the loop asks the system for events, and then runs their handlers. Events that arrive meanwhile
wait in the system. A selector with a ready event is itself readable, so one poll of the selector shows that.
"""

import asyncio
import select
from typing import Any, Protocol

from baton.runtime.clock import Clock


class PendingEvents(Protocol):
    """Detector of events that have arrived for an event loop, and that the loop has not handled."""

    def waiting(self, lull_us: int) -> bool:
        """Return whether an event waits for the loop, or one was found less than `lull_us` microseconds ago.

        The second case allows for a library's own threads, which pass events on a little later.
        """

    def came(self) -> None:
        """Record that an event arrived just now. Called by code that has found one by other means than
        `waiting`."""


class SystemPendingEvents:
    """Detector of waiting events for a uvloop event loop. Used within that loop."""

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
