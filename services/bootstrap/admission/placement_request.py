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
    """Error: the request is rejected, because the queue for workers is full."""


class NotInTime(QueueFull):
    """Error: the request is rejected, because it is expected to wait longer than it may."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Facts about the last room of a request, for the choice of its next room."""

    room: RoomId
    reason: Reason
    """Reason for which the room ended. After a refusal (`is_refused`): the reason of the last room that was
    not refused, if there was one."""
    avoid: frozenset[Incarnation]
    """Incarnations of workers on which the request is placed only if there are no others."""
    wait_s: float | None
    """Longest time in seconds for which the request waits until a side has a ready worker. None: as long as
    the caller waits."""
    pause_s: float = 0.0
    """Seconds to wait before the request is placed on workers again."""
    fit_before: bool = True
    """Whether the workers of the request's last room could hold the request in its present length."""
    margin: int = 0
    """Number of KV positions that have to be free on decode when the request's next room begins, in addition
    to those that it takes."""
    returns_to: Incarnation | None = None
    """Decode worker that retracted the request's last room, or retracted an earlier one and had the last. It
    serves the request to its end even while it drains."""

    is_refused: bool = False
    """Whether a full worker refused the request's last room. The request waits for what it waited for before
    that room."""
    until_s: float | None = None
    """Time of the event loop in seconds at which the wait for workers ends. None: its caller ends it."""

    @property
    def is_attempt(self) -> bool:
        """Whether the request's last room failed, so that it counts as an attempt. A retracted (preempted) or
        refused room has not failed."""
        return not self.is_refused and REASONS[self.reason].is_attempt

    @property
    def is_retracted(self) -> bool:
        """Whether the request had a room that was retracted (preempted), and it waits to go on."""
        return self.reason is Reason.RETRACTED


@dataclass(slots=True)
class PlacementRequest:
    request_id: str
    need: Need
    retry: Retry | None
    prompt: Sequence[int]
    """Prompt token ids of the request, from which the prefix hashes are computed. Empty after that."""
    salt: int
    trace: TraceContext | None
    claim: QueueKey


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """Request that waits in the queue, because no pair of workers has space for it now. At least one pair can
    hold it."""

    request: PlacementRequest
    opened: asyncio.Future[RoomEntry]
    queued: Event | None = None
    """Timeline line (event QUEUED) that the request's later room begins with. None before the request
    waits."""
    reserved: Incarnation | None = None
    """Decode worker that the last scan of the queue reserved for the request. None if there was none."""


def not_in_time(wait_ms: int, before: int) -> NotInTime:
    ahead = f"{counted(before, 'request')} before it"
    return NotInTime(f"it would wait {round(wait_ms / 1000, 1):g} s for workers: {ahead}")
