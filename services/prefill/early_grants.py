"""Grants that reach a prefill worker before their rooms.

The bootstrap opens a room on both workers at once, so the decode worker may be faster. Its grant does not
create the room here (`room-issued`). The grant waits, and is applied when the room has opened.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.ids import Incarnation, RoomId

EARLY_GRANT_S: Final = 60.0
"""Seconds for which a grant waits for its room to open. It is the time in which the router delivers a room to
both workers (`baton.fleet.room_table.DELIVERY_MS`)."""


@dataclass(eq=False, slots=True)
class EarlyGrant:
    """Grant (a room's destination pages) that came from a decode worker before this worker opened the
    room."""

    room: RoomId
    receiver: Incarnation
    apply: Callable[[], None]
    expired: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


class EarlyGrants:
    """Grants that came before their rooms were opened here, by room and decode worker, on the leader. Grants
    of one decode worker never displace those of another."""

    def __init__(self, most: int) -> None:
        """Start without grants. `most`: most waiting grants of one decode worker."""
        self._most = most
        self._grants: dict[RoomId, dict[Incarnation, EarlyGrant]] = {}
        self._counts: Counter[Incarnation] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def add(
        self, room: RoomId, receiver: Incarnation, apply: Callable[[], None], expired: Callable[[], None]
    ) -> EarlyGrant | None:
        """Add a grant that waits for its room. Return it.

        `apply`: called when the room opens. `expired`: called if the room does not open in time. An earlier
        grant of the same room and receiver, from another stream, is dropped, and neither of its functions is
        called. Return None, and call nothing, if the receiver has too many waiting grants.
        """
        before = self._grants.get(room, {}).get(receiver)
        if before is not None:
            self.drop(before)
        if self._counts[receiver] >= self._most:
            return None
        grant = EarlyGrant(room, receiver, apply, expired)
        grant.timer = asyncio.get_running_loop().call_later(EARLY_GRANT_S, self._expire, grant)
        self._grants.setdefault(room, {})[receiver] = grant
        self._counts[receiver] += 1
        return grant

    def apply(self, room: RoomId) -> None:
        """Apply the grants that waited for this room, which has now opened."""
        for grant in list(self._grants.get(room, {}).values()):
            self.drop(grant)
            grant.apply()

    def drop(self, grant: EarlyGrant) -> None:
        """Remove a grant that waits for its room, without calling its functions. Idempotent. A later grant of
        the same room and receiver stays."""
        grants = self._grants.get(grant.room, {})
        if grants.get(grant.receiver) is not grant:
            return
        del grants[grant.receiver]
        if not grants:
            del self._grants[grant.room]
        self._counts -= Counter({grant.receiver: 1})
        if grant.timer is not None:
            grant.timer.cancel()

    def _expire(self, grant: EarlyGrant) -> None:
        self.drop(grant)
        grant.expired()
