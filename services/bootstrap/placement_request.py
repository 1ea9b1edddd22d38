"""What does a request ask admission for, and what is it refused with?"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.fleet.fair_queue import QueueKey
from baton.fleet.placement import Need
from baton.fleet.room_entry import RoomEntry
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Reason
from baton.rooms.reasons import REASONS
from baton.rooms.timeline import Event
from baton.rooms.trace import TraceContext


class QueueFull(Exception):
    """As many requests wait for a pair of workers as may."""


class NotInTime(QueueFull):
    """What is ahead of the request would take longer than the request may wait."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Of a request that had a room: what the next one is to know of it."""

    room: RoomId
    reason: Reason
    avoid: frozenset[Incarnation]
    """Workers that get the request only if there are no others."""
    wait_s: float | None
    """How long a side without a worker for it is hoped to get one; None: as long as the caller waits."""
    pause_s: float = 0.0
    """Before anything is asked for."""
    fits: bool = True
    """The workers that it had could hold what is asked for now."""
    margin: int = 0
    """KV positions that decode is to have free for it beside those that it begins with."""
    back: Incarnation | None = None
    """The decode worker that retracted the room, or an earlier one of it, and where the last one was: it
    serves the request to its end even while it drains."""

    @property
    def is_attempt(self) -> bool:
        """The room failed: it was not retracted."""
        return REASONS[self.reason].is_attempt


@dataclass(slots=True)
class PlacementRequest:
    request_id: str
    need: Need
    retry: Retry | None
    prompt: Sequence[int]
    """Until it is hashed, which is done once."""
    salt: int
    trace: TraceContext | None
    claim: QueueKey


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that fits a pair of workers, but not now."""

    request: PlacementRequest
    opened: asyncio.Future[RoomEntry]
    queued: Event | None = None
    """The line of its timeline that says so, once it has to wait."""
    reserved: Incarnation | None = None
    """The decode worker that was left to it at the last look."""
