"""What becomes of a grant that comes before its room does?

A room is opened on both workers at once, so that the receiver may be the faster one. Its grant creates
nothing here (`room-issued`): it is kept beside the rooms, and asked again when the room has come.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.ids import Incarnation, RoomId

EARLY_GRANT_S: Final = 60.0
"""As long as whoever opens a room may take to bring it to both workers
(`baton.fleet.registry.DELIVERY_MS`): after that it does not come."""


@dataclass(eq=False, slots=True)
class EarlyGrant:
    """One that is kept, of one receiver."""

    room: RoomId
    receiver: Incarnation
    again: Callable[[], None]
    expired: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


class EarlyGrants:
    """Keyed by room and receiver: one receiver's grant does not take the place of another's. The leader's."""

    def __init__(self, most: int) -> None:
        """`most`: of one receiver."""
        self._most = most
        self._kept: dict[RoomId, dict[Incarnation, EarlyGrant]] = {}
        self._counts: Counter[Incarnation] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def keep(
        self, room: RoomId, receiver: Incarnation, again: Callable[[], None], expired: Callable[[], None]
    ) -> EarlyGrant | None:
        """Call `again` when the room comes, or `expired` when it does not in time. Of an earlier grant of
        the room and receiver, which was said on another stream, nothing is called. None when the receiver has
        as many as it may have; nothing is called then either."""
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
        """The room was opened."""
        for kept in list(self._kept.get(room, {}).values()):
            self.drop(kept)
            kept.again()

    def drop(self, kept: EarlyGrant) -> None:
        """It is not wanted any more. Idempotent: another that took its place stays."""
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
