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
        """Decode worker of each room that ended early, by room id. An entry stays until the room's request
        looks for its next room or gives up."""
        self.queued: dict[Incarnation, dict[int, QueueEntry[WaitingRequest]]] = {}
        """Queued requests whose rooms a decode worker retracted, by the worker's incarnation and then by
        serial number. The oldest is first."""
        self._paused: Counter[Incarnation | None] = Counter()
        """Number of requests that are looking for their next room now, by the decode worker that retracted
        their last one."""

    def add(self, entry: RoomEntry) -> None:
        """Record that a room has ended early, and that its decode worker has to stay for its request. The
        worker stays until the request looks for its next room or gives up."""
        self.rooms[entry.id] = entry.decode.incarnation

    def withdraw(self, room: RoomId) -> None:
        """Record that a draining decode worker no longer has to stay for a room's request. The request now
        looks for its next room, or gives up."""
        self.rooms.pop(room, None)

    def count(self, incarnation: Incarnation) -> int:
        """Return the number of requests for which a draining decode worker has to stay."""
        unread = sum(each == incarnation for each in self.rooms.values())
        return self._paused[incarnation] + unread

    def pause(self, incarnation: Incarnation | None) -> AbstractContextManager[None]:
        """Count a request as one for which the decode worker has to stay, during a `with` block. In the
        block, the request looks for its next room."""
        return one_more(self._paused, incarnation)

    def enter(self, incarnation: Incarnation | None, one: QueueEntry[WaitingRequest]) -> None:
        """Record that a request has entered the queue, whose last room the worker `incarnation` retracted.
        With None, nothing is recorded."""
        if incarnation is not None:
            self.queued.setdefault(incarnation, {})[one.number] = one

    def leave(self, incarnation: Incarnation | None, one: QueueEntry[WaitingRequest]) -> None:
        """Record that a request whose room this worker retracted is no longer in the queue."""
        if incarnation is not None:
            del self.queued[incarnation][one.number]
            if not self.queued[incarnation]:
                del self.queued[incarnation]

    def unseen(self, incarnation: Incarnation, most: int) -> list[QueueEntry[WaitingRequest]]:
        """Return queued requests whose rooms this worker retracted, and which the present scan of the queue
        did not reach. At most `most` are returned."""
        queued = self.queued.get(incarnation, {}).values()
        return list(
            islice((one for one in queued if not (one.is_skipped or one.waiting.opened.done())), most)
        )
