"""Placement requests, as admission takes and queues them, and their refusals."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.fleet.fair_queue import QueueKey
from baton.fleet.need import Need
from baton.fleet.room_entry import RoomEntry
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Reason
from baton.rooms.plurals import counted
from baton.rooms.reasons import REASONS
from baton.rooms.timeline import Event
from baton.rooms.trace import TraceContext


class QueueFull(Exception):
    """The queue for workers is full."""


class NotInTime(QueueFull):
    """The work before the request would take longer than it may wait."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Facts about the last room of a request, for the choice of its next one."""

    room: RoomId
    reason: Reason
    avoid: frozenset[Incarnation]
    """Workers that get the request only if there are no others."""
    wait_s: float | None
    """Time to wait for a side to get a ready worker, in seconds. None: as long as the caller waits."""
    pause_s: float = 0.0
    """Pause before the request is placed again, in seconds."""
    fit_before: bool = True
    """Whether the workers of its last room could hold the request as it is now."""
    margin: int = 0
    """KV positions that decode needs free besides those that the room begins with."""
    returns_to: Incarnation | None = None
    """Decode worker that retracted the last room, or an earlier one if the last one was there. It serves the
    request to its end even while it drains."""

    @property
    def is_attempt(self) -> bool:
        """Whether the room failed, and was not retracted."""
        return REASONS[self.reason].is_attempt


@dataclass(slots=True)
class PlacementRequest:
    request_id: str
    need: Need
    retry: Retry | None
    prompt: Sequence[int]
    """Prompt tokens until they are hashed, which is done once."""
    salt: int
    trace: TraceContext | None
    claim: QueueKey


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that fits a pair of workers, but not now."""

    request: PlacementRequest
    opened: asyncio.Future[RoomEntry]
    queued: Event | None = None
    """Timeline line QUEUED, once the request waits."""
    reserved: Incarnation | None = None
    """Decode worker that was reserved for it by the last scan."""


def not_in_time(wait_ms: int, before: int) -> NotInTime:
    ahead = f"{counted(before, 'request')} before it"
    return NotInTime(f"it would wait {round(wait_ms / 1000, 1):g} s for workers: {ahead}")
