"""Requests for a pair of workers, as admission takes and queues them, and the errors that refuse them."""

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
    """The queue for workers is full, so the request is rejected."""


class NotInTime(QueueFull):
    """The request is rejected: with the work before it, it would wait longer than it may."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Facts about the last room of a request, for the choice of its next room."""

    room: RoomId
    reason: Reason
    avoid: frozenset[Incarnation]
    """Incarnations of the workers that get the request only if there are no others."""
    wait_s: float | None
    """Longest wait for a side to get a ready worker, in seconds. None: as long as the caller waits."""
    pause_s: float = 0.0
    """Pause before the request is placed again, in seconds."""
    fit_before: bool = True
    """Whether the workers of the request's last room could hold the request as it is now."""
    margin: int = 0
    """Number of KV positions that have to be free on decode, in addition to those with which the room
    begins."""
    returns_to: Incarnation | None = None
    """Decode worker that retracted the request's last room, or retracted an earlier one and had the last. It
    serves the request to its end even while it drains."""

    @property
    def is_attempt(self) -> bool:
        """Whether the last room failed. A retracted room has not."""
        return REASONS[self.reason].is_attempt


@dataclass(slots=True)
class PlacementRequest:
    request_id: str
    need: Need
    retry: Retry | None
    prompt: Sequence[int]
    """Prompt tokens of the request. Empty once they are hashed, which is done once."""
    salt: int
    trace: TraceContext | None
    claim: QueueKey


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """Request in the queue for workers. Some pair can hold it, but none has space now."""

    request: PlacementRequest
    opened: asyncio.Future[RoomEntry]
    queued: Event | None = None
    """Line QUEUED for the timeline of the request's room; None before the request waits."""
    reserved: Incarnation | None = None
    """Decode worker that the last scan of the queue reserved for the request. None if there was none."""


def not_in_time(wait_ms: int, before: int) -> NotInTime:
    ahead = f"{counted(before, 'request')} before it"
    return NotInTime(f"it would wait {round(wait_ms / 1000, 1):g} s for workers: {ahead}")
