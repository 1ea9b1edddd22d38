"""Requests that a decode worker serves to their end, even while it drains (`drain-keeps-promises`)."""

from collections import Counter
from contextlib import AbstractContextManager
from itertools import islice

from baton.bootstrap.admission.counters import one_more
from baton.bootstrap.admission.placement_request import WaitingRequest
from baton.fleet.fair_queue import QueueEntry
from baton.fleet.room_entry import RoomEntry
from baton.ids import Incarnation, RoomId


class DecodePromises:
    """Requests between two rooms that may continue on the decode worker of the room before."""

    def __init__(self) -> None:
        self.rooms: dict[RoomId, Incarnation] = {}
        """Decode worker of each room that ended early, by room, until its reader wants the next room."""
        self.queued: dict[Incarnation, dict[int, QueueEntry[WaitingRequest]]] = {}
        """Queued requests by the decode worker that retracted their rooms, and by serial number; the first to
        come first."""
        self._paused: Counter[Incarnation | None] = Counter()
        """Number of requests that look for their next room, by the decode worker that retracted the last
        one."""

    def add(self, entry: RoomEntry) -> None:
        """Record that a room ended early, and that its request may continue on the same decode worker. The
        worker waits until the request looks for its next room or gives up."""
        self.rooms[entry.id] = entry.decode.incarnation

    def withdraw(self, room: RoomId) -> None:
        """Record that the request of an ended room looks for its next room, or gives up. The draining decode
        worker of that room no longer waits for it."""
        self.rooms.pop(room, None)

    def count(self, incarnation: Incarnation) -> int:
        """Return the number of requests that a draining decode worker has to wait for."""
        unread = sum(each == incarnation for each in self.rooms.values())
        return self._paused[incarnation] + unread

    def pause(self, incarnation: Incarnation | None) -> AbstractContextManager[None]:
        """Let a draining worker wait for a request during a `with` block, in which the request looks for its
        next room."""
        return one_more(self._paused, incarnation)

    def enter(self, incarnation: Incarnation | None, one: QueueEntry[WaitingRequest]) -> None:
        """Record that a request is queued whose room this worker retracted. With None, no worker did."""
        if incarnation is not None:
            self.queued.setdefault(incarnation, {})[one.number] = one

    def leave(self, incarnation: Incarnation | None, one: QueueEntry[WaitingRequest]) -> None:
        """Record that a request whose room this worker retracted has left the queue."""
        if incarnation is not None:
            del self.queued[incarnation][one.number]
            if not self.queued[incarnation]:
                del self.queued[incarnation]

    def unseen(self, incarnation: Incarnation, most: int) -> list[QueueEntry[WaitingRequest]]:
        """Return up to `most` queued requests that this worker retracted and that the present scan of the
        queue did not reach."""
        queued = self.queued.get(incarnation, {}).values()
        return list(
            islice((one for one in queued if not (one.is_skipped or one.waiting.opened.done())), most)
        )
