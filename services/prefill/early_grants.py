"""Grants that arrive before their rooms.

A room is opened on both workers at once, so the receiver may be faster. Its grant creates no room here
(`room-issued`). It waits beside the rooms, and is applied again when the room has opened.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.ids import Incarnation, RoomId

EARLY_GRANT_S: Final = 60.0
"""Seconds for which a grant waits. It is the time in which the router delivers a room to both workers
(`baton.fleet.room_table.DELIVERY_MS`)."""


@dataclass(eq=False, slots=True)
class EarlyGrant:
    """Waiting grant of one receiver."""

    room: RoomId
    receiver: Incarnation
    again: Callable[[], None]
    expired: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


class EarlyGrants:
    """Waiting grants by room and receiver, on the leader. Grants of one receiver never displace another's."""

    def __init__(self, most: int) -> None:
        """Make it empty. `most`: most waiting grants of one receiver."""
        self._most = most
        self._kept: dict[RoomId, dict[Incarnation, EarlyGrant]] = {}
        self._counts: Counter[Incarnation] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def keep(
        self, room: RoomId, receiver: Incarnation, again: Callable[[], None], expired: Callable[[], None]
    ) -> EarlyGrant | None:
        """Add a grant. `again` is called when the room opens, `expired` if it does not in time.

        It replaces an earlier grant of the same room and receiver, sent on another stream, without any
        call. Return None, without any call, if the receiver has too many.
        """
        before = self._kept.get(room, {}).get(receiver)
        if before is not None:
            self.drop(before)
        if self._counts[receiver] >= self._most:
            return None
        kept = EarlyGrant(room, receiver, again, expired)
        kept.timer = asyncio.get_running_loop().call_later(EARLY_GRANT_S, self._expire, kept)
        self._kept.setdefault(room, {})[receiver] = kept
        self._counts[receiver] += 1
        return kept

    def come(self, room: RoomId) -> None:
        """Apply the waiting grants of a room that has opened."""
        for kept in list(self._kept.get(room, {}).values()):
            self.drop(kept)
            kept.again()

    def drop(self, kept: EarlyGrant) -> None:
        """Drop a grant. Idempotent. A later one in its place stays."""
        grants = self._kept.get(kept.room, {})
        if grants.get(kept.receiver) is not kept:
            return
        del grants[kept.receiver]
        if not grants:
            del self._kept[kept.room]
        self._counts -= Counter({kept.receiver: 1})
        if kept.timer is not None:
            kept.timer.cancel()

    def _expire(self, kept: EarlyGrant) -> None:
        self.drop(kept)
        kept.expired()
