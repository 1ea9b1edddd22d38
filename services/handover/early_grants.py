"""Grants that reach a prefill worker before their rooms.

The bootstrap opens a room on both workers at once, so the decode worker may be faster. Its grant does not
create the room here (`room-issued`). The grant waits, and is applied when the room has opened.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.ids import Incarnation, RoomId
from baton.rooms.errors import UnknownRoom

G = TypeVar("G")


class EarlyGrantOwner(Protocol):
    def room_opened(self, room: RoomId) -> None:
        """Apply the early grant of a room, which has now opened."""


@dataclass(eq=False, slots=True)
class EarlyGrant(Generic[G]):
    """Grant (a room's destination pages) that came from a decode worker before this worker opened the
    room."""

    room: RoomId
    receiver: Incarnation
    grant: G
    refusal: UnknownRoom
    """Error with which the grant is refused if the room does not open in time."""
    owner: EarlyGrantOwner


class EarlyGrants(Generic[G]):
    """Grants that came before their rooms were opened here, by room and decode worker, on the leader. Grants
    of one decode worker never displace those of another."""

    def __init__(self, most: int) -> None:
        """Start without grants. `most`: most waiting grants of one decode worker."""
        self._most = most
        self._grants: dict[RoomId, dict[Incarnation, EarlyGrant[G]]] = {}
        self._counts: Counter[Incarnation] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, grant: EarlyGrant[G]) -> bool:
        """Add a grant that waits for its room. An earlier grant of the same room and receiver is dropped.

        Return False, and do not add it, if the receiver has too many waiting grants.
        """
        before = self._grants.get(grant.room, {}).get(grant.receiver)
        if before is not None:
            self.drop(before)
        if self._counts[grant.receiver] >= self._most:
            return False
        self._grants.setdefault(grant.room, {})[grant.receiver] = grant
        self._counts[grant.receiver] += 1
        return True

    def apply(self, room: RoomId) -> None:
        """Let the owners apply the grants that waited for this room, which has now opened."""
        for grant in list(self._grants.get(room, {}).values()):
            self.drop(grant)
            grant.owner.room_opened(room)

    def drop(self, grant: EarlyGrant[G]) -> bool:
        """Remove a grant that waits for its room. Return whether it still waited. A later grant of the same
        room and receiver stays."""
        grants = self._grants.get(grant.room, {})
        if grants.get(grant.receiver) is not grant:
            return False
        del grants[grant.receiver]
        if not grants:
            del self._grants[grant.room]
        self._counts -= Counter({grant.receiver: 1})
        return True
