"""Timers of one event loop, by key."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """Running timers, at most one for each key. Used from one event loop."""

    def __init__(self, fire: Callable[[K], None]) -> None:
        """Start without timers. `fire`: called with the key of each timer whose time is over."""
        self._fire = fire
        self._running: dict[K, asyncio.TimerHandle] = {}

    def start(self, key: K, after_s: float) -> None:
        """Start a timer of `after_s` seconds. It replaces a running one of the same key."""
        self.stop(key)
        self._running[key] = asyncio.get_running_loop().call_later(after_s, self._end, key)

    def stop(self, key: K) -> None:
        """Stop a timer. Idempotent."""
        running = self._running.pop(key, None)
        if running is not None:
            running.cancel()

    def stop_all(self) -> None:
        for key in list(self._running):
            self.stop(key)

    def _end(self, key: K) -> None:
        del self._running[key]
        self._fire(key)
