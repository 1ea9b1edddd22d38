"""Requests whose room failed and that wait until a side has a ready worker again."""

import asyncio
from collections import Counter
from collections.abc import Hashable

from baton.bootstrap.admission.counters import one_more
from baton.rooms.phases import Side


class ReadyWait:
    """Requests that wait for a ready worker, counted by priority class and missing side. Used from one event
    loop."""

    def __init__(self) -> None:
        self._waiting: Counter[tuple[int, Side | None]] = Counter()
        self._outlook: Hashable = None
        """Value of `Registry.outlook` when the waiting requests last looked for a worker. When it changes,
        they look again."""
        self._news = asyncio.Event()
        """Event that is set for a moment to wake all waiting requests, when a worker may have become
        ready."""

    def total(self) -> int:
        """Return the number of requests that wait for a ready worker."""
        return self._waiting.total()

    def by_class(self) -> Counter[int]:
        """Return the number of waiting requests by priority class."""
        counts: Counter[int] = Counter()
        for (priority, _), count in self._waiting.items():
            counts[priority] += count
        return counts

    def by_side(self) -> Counter[Side]:
        """Return the number of waiting requests by the side that has no ready worker. Requests for which both
        sides are missing are left out."""
        counts: Counter[Side] = Counter()
        for (_, side), count in self._waiting.items():
            if side is not None:
                counts[side] += count
        return counts

    async def wait(self, priority: int, side: Side | None, until_s: float | None) -> bool:
        """Wait until a worker may have become ready. Return False if the time `until_s` comes first.

        `side`: side without a ready worker, None if it is not one side alone. `until_s`: time of the event
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
        """Let all waiting requests look for a worker again, if `outlook` (the value of `Registry.outlook`)
        has changed. `force`: do so in any case."""
        if outlook != self._outlook or force:
            self._outlook = outlook
            self._news.set()
            self._news.clear()
