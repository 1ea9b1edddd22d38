"""Orphans of all workers: rooms of other routers that this one may adopt, by the key of their request."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from baton.ids import Incarnation
from baton.wire.load_messages import Orphan


class FoundOrphan(NamedTuple):
    orphan: Orphan
    decode: Incarnation
    """Incarnation of the decode worker that reported it."""


class OrphanTable:
    """Table of orphans, as decode workers reported them last. Used from one event loop."""

    def __init__(self) -> None:
        self._of: dict[Incarnation, Sequence[Orphan]] = {}
        """Orphans of each decode worker that has some."""
        self._by_key: dict[bytes, FoundOrphan] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_key)

    def update(self, decode: Incarnation, orphans: Sequence[Orphan]) -> None:
        """Replace the orphans of a decode worker by those of its last report."""
        before = self._of.pop(decode, ())
        if not before and not orphans:
            return
        for each in before:
            if self._by_key.get(each.key) == FoundOrphan(each, decode):
                del self._by_key[each.key]
        if orphans:
            self._of[decode] = orphans
        for each in orphans:
            self._by_key[each.key] = FoundOrphan(each, decode)
        self._news.set()

    async def take(self, key: bytes, within_s: float) -> FoundOrphan | None:
        """Wait for an orphan with this key, remove it from the table, and return it. Return None if no worker
        has reported one after `within_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while key not in self._by_key:
                    self._news.clear()
                    await self._news.wait()
        return self._by_key.pop(key, None)
