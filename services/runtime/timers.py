"""Timers of one event loop, by key."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """Running timers, at most one for each key. Used from one event loop.

    Only running timers refer to their owner, so that an owner without them is freed at once. A reference from
    here would keep it until the next garbage collection.
    """

    def __init__(self) -> None:
        self._running: dict[K, asyncio.TimerHandle] = {}

    def start(self, key: K, after_s: float, fire: Callable[[K], None]) -> None:
        """Start a timer of `after_s` seconds. It replaces a running one of the same key. `fire`: called with
        the key when the time is over."""
        self.stop(key)
        loop = asyncio.get_running_loop()
        self._running[key] = loop.call_later(after_s, self._end, key, fire)

    def stop(self, key: K) -> None:
        """Stop a timer. Idempotent."""
        running = self._running.pop(key, None)
        if running is not None:
            running.cancel()

    def stop_all(self) -> None:
        for key in list(self._running):
            self.stop(key)

    def _end(self, key: K, fire: Callable[[K], None]) -> None:
        del self._running[key]
        fire(key)
