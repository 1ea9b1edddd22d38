"""Retried requests that wait for a side to have a ready worker again."""

import asyncio
from collections import Counter
from collections.abc import Hashable

from baton.bootstrap.admission.counters import one_more
from baton.rooms.phases import Side


class ReadyWait:
    """Waits for ready workers, counted by priority class and missing side. Used from one event loop."""

    def __init__(self) -> None:
        self._waiting: Counter[tuple[int, Side | None]] = Counter()
        self._outlook: Hashable = None
        """Registry's outlook when waiting requests last looked again."""
        self._news = asyncio.Event()
        """Set for a moment when a worker may have become ready."""

    def total(self) -> int:
        """Return the number of waiting requests."""
        return self._waiting.total()

    def by_class(self) -> Counter[int]:
        """Return the number of waiting requests by priority class."""
        counts: Counter[int] = Counter()
        for (priority, _), count in self._waiting.items():
            counts[priority] += count
        return counts

    def by_side(self) -> Counter[Side]:
        """Return the number of waiting requests by missing side. Those that miss both are left out."""
        counts: Counter[Side] = Counter()
        for (_, side), count in self._waiting.items():
            if side is not None:
                counts[side] += count
        return counts

    async def wait(self, priority: int, side: Side | None, until_s: float | None) -> bool:
        """Wait until a worker may have become ready. Return False if `until_s` comes first.

        `side`: side without a ready worker, None if it is not one of them alone. `until_s`: time of the event
        loop in seconds, None for no end.
        """
        with one_more(self._waiting, (priority, side)):
            try:
                async with asyncio.timeout_at(until_s):
                    await self._news.wait()
            except TimeoutError:
                return False
            return True

    def wake(self, outlook: Hashable, *, force: bool) -> None:
        """Let all waiting requests look again if the registry's outlook has changed. `force`: in any case."""
        if outlook != self._outlook or force:
            self._outlook = outlook
            self._news.set()
            self._news.clear()
