"""What becomes of a grant that comes before its room does?

A room is opened on both workers at once, so that the receiver may be the faster one. Its grant creates
nothing here (`room-issued`): it is kept beside the rooms, and asked again when the room has come.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.rooms.ids import Incarnation, RoomId

KEPT_S: Final = 60.0
"""As long as whoever opens a room may take to bring it to both workers
(`services.rooms.registry.UNTAKEN_MS`): after that it does not come."""


@dataclass(frozen=True, slots=True)
class _Kept:
    again: Callable[[], None]
    timer: asyncio.TimerHandle


class EarlyGrants:
    """Keyed by room and receiver: one receiver's grant does not take the place of another's. The leader's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[RoomId, dict[Incarnation, _Kept]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def keep(
        self, room: RoomId, receiver: Incarnation, again: Callable[[], None], expired: Callable[[], None]
    ) -> bool:
        """Call `again` when the room comes, or `expired` when it does not in time. False when there are as
        many as there may be; nothing is called then."""
        if self._count >= self._most:
            return False
        self.drop(room, receiver)

        def end() -> None:
            self.drop(room, receiver)
            expired()

        timer = asyncio.get_running_loop().call_later(KEPT_S, end)
        self._kept.setdefault(room, {})[receiver] = _Kept(again, timer)
        self._count += 1
        return True

    def come(self, room: RoomId) -> None:
        """The room was opened."""
        for kept in self._kept.pop(room, {}).values():
            self._count -= 1
            kept.timer.cancel()
            kept.again()

    def drop(self, room: RoomId, receiver: Incarnation) -> None:
        """It is not wanted any more. Idempotent."""
        grants = self._kept.get(room, {})
        kept = grants.pop(receiver, None)
        if kept is None:
            return
        self._count -= 1
        kept.timer.cancel()
        if not grants:
            del self._kept[room]
