"""Rooms at the router: open ones with the reports that they wait for, and ended ones by their outcome.

The opener of a room is the process that asked for it and calls its workers: this router, or a client of its
gRPC service. Room ids are made only here (`room-issued`). They are a counter with a random start. So no id is
used twice (`room-unique`), and after a restart of the router one repeats with a chance of 2^-30. The workers
of a room cannot be read from its id. The module is pure: time is an argument.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Final, TypeVar

from baton.fleet.due_queue import DueQueue
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.fleet.room_index import RoomIndex
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import (
    Cause,
    UnknownRoom,
)
from baton.rooms.timeline import Event

CLOSING_MS: Final = 60_000
"""Time for the workers of an ended room to report it retired, in milliseconds. After that, it is stored
without the reports."""
OPEN_MS_MAX: Final = 4 * 3_600_000
"""Longest time that a room may be open, in milliseconds. It exceeds all deadlines on the workers, and ends
rooms whose opener is gone (`room-ends`)."""
DELIVERY_MS: Final = 60_000
"""Time for the opener of a room (the process that asked for it) to send it to both workers, in
milliseconds."""
OUTCOME_MS: Final = 10_000
"""Time for the opener of a room (the process that asked for it) to report the outcome, after both workers
have retired the room, in milliseconds."""
CANARY_ROOMS_FILED_MAX: Final = 64
"""Most ended canary rooms that are remembered. They are stored apart from clients' rooms, since a worker that
never gets ready causes one a second."""

K = TypeVar("K")
V = TypeVar("V")


class RoomTable:
    """Table of all rooms that the router knows, by id. It is the base class of `Registry`, without the leases
    of workers."""

    def __init__(self, first_room: int, done_max: int, failed_max: int) -> None:
        """Make an empty table.

        `first_room`: first room id, random, at least 1 and below 2^62. `done_max`, `failed_max`: most ended
        rooms that are remembered, answered and failed ones.
        """
        self._next_room = first_room
        self.done_max = done_max
        self.failed_max = failed_max
        self._open: dict[RoomId, RoomEntry] = {}
        self._done: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._failed: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._canaries: OrderedDict[RoomId, RoomEntry] = OrderedDict()
        self._tables = (self._open, self._done, self._failed, self._canaries)
        self.phases: Counter[RoomPhase] = Counter()
        """Number of open rooms by phase."""
        self._rooms_by_worker: dict[Incarnation, dict[RoomId, RoomEntry]] = {}
        """Open rooms of each worker, by the worker's incarnation. Workers that are gone are included."""
        self._undelivered: DueQueue[RoomId, RoomEntry] = DueQueue(DELIVERY_MS)
        """Open rooms that their opener, the process that asked for the room, has not sent to all their
        workers."""
        self._without_outcome: DueQueue[RoomId, RoomEntry] = DueQueue(OPEN_MS_MAX)
        """Open rooms whose outcome is not known yet."""
        self._released: dict[RoomId, RoomEntry] = {}
        """Rooms without an outcome that their workers have retired since the last call of `orphans`."""
        self._awaiting_outcome: DueQueue[RoomId, RoomEntry] = DueQueue(OUTCOME_MS)
        """Rooms without an outcome that their workers had retired by the last call of `orphans`."""
        self._closing: DueQueue[RoomId, RoomEntry] = DueQueue(CLOSING_MS)
        """Rooms with an outcome that some worker has not reported retired."""
        self.index = RoomIndex()
        """Index by which rooms are found: by request, by HTTP request, by failure."""

    def get(self, room: RoomId) -> RoomEntry:
        entry = self._open.get(room)
        if entry is not None:
            return entry
        for table in self._tables:
            if room in table:
                return table[room]
        raise UnknownRoom(f"room {room} is not known here")

    def find(self, request_id: str) -> list[RoomEntry]:
        """Return the rooms of exactly this request id, newest first. There are several if the request was
        retried, or if the client used the id again."""
        return list(self.index.named(request_id))

    def rooms(self) -> Iterator[RoomEntry]:
        """Yield all known rooms: first the open ones, then the ended ones, each group newest first."""
        for table in self._tables:
            yield from reversed(table.values())

    def open_rooms(self) -> list[RoomEntry]:
        """Return all open rooms, newest first."""
        return list(reversed(self._open.values()))

    def known_count(self) -> int:
        return sum(len(table) for table in self._tables)

    def open_count(self) -> int:
        return len(self._open)

    def open_rooms_of(self, incarnation: Incarnation) -> list[RoomEntry]:
        """Return the open rooms of one worker, oldest first. The worker may have left."""
        return list(self._rooms_by_worker.get(incarnation, {}).values())

    def has_open_rooms(self, incarnation: Incarnation) -> bool:
        return incarnation in self._rooms_by_worker

    def record(self, room: RoomId, event: Event) -> bool:
        """Add an event to a room's timeline. Return False if the table does not have the room."""
        try:
            entry = self.get(room)
        except UnknownRoom:
            return False
        entry.record(event)
        return True

    def mark_streaming(self, room: RoomId) -> None:
        entry = self._open.get(room)
        if entry is not None and entry.phase is RoomPhase.OPEN:
            self._enter(entry, RoomPhase.STREAMING)

    def orphans(self, now_ms: int) -> list[RoomEntry]:
        """Return rooms whose opener (the process that asked for the room) seems to be gone. The caller has to
        `end` them, and to cancel them on their workers.

        Such a room was not delivered to both workers in DELIVERY_MS, or is open for OPEN_MS_MAX. Or both
        workers retired it OUTCOME_MS ago, and it has no outcome.
        """
        for entry in self._released.values():
            self._awaiting_outcome.enter(entry.id, entry, now_ms)
        self._released.clear()
        waits = (self._undelivered, self._without_outcome, self._awaiting_outcome)
        late = {entry.id: entry for wait in waits for entry in wait.due(now_ms)}
        return [late[room] for room in sorted(late)]

    def overdue(self, now_ms: int) -> list[RoomEntry]:
        """Return ended rooms whose workers did not report them retired in time. The caller has to `abandon`
        them."""
        return self._closing.due(now_ms)

    def end(self, room: RoomId, cause: Cause | None, now_ms: int) -> bool:
        """Record the outcome of a room: its cause, or None if the request was answered. Return False if it
        had an outcome before, which stays."""
        entry = self._open.get(room)
        if entry is None or entry.phase is RoomPhase.CLOSING:
            return False
        self._enter(entry, RoomPhase.CLOSING)
        for wait in (self._undelivered, self._without_outcome, self._awaiting_outcome):
            wait.leave(room)
        self._released.pop(room, None)
        self._closing.enter(room, entry, now_ms)
        entry.closing_ms = now_ms
        entry.cause = cause
        if entry.has_failed:
            self.index.failed(entry)
        self._file_if_retired(entry)
        return True

    def _fresh_id(self) -> RoomId:
        room = RoomId(self._next_room)
        self._next_room += 1
        return room

    def _enter(self, entry: RoomEntry, phase: RoomPhase) -> None:
        self.phases[entry.phase] -= 1
        entry.phase = phase
        if phase is not RoomPhase.RETIRED:
            self.phases[phase] += 1

    def _look_at_opener(self, entry: RoomEntry) -> None:
        """Update which reports are awaited from a room's opener (the process that asked for it), after a
        worker got the room or retired it."""
        if not entry.waits_for_opener:
            self._undelivered.leave(entry.id)
        if (
            not entry.waiting_for
            and entry.phase is not RoomPhase.CLOSING
            and entry.id not in self._awaiting_outcome
        ):
            self._released[entry.id] = entry

    def _file_if_retired(self, entry: RoomEntry) -> None:
        if entry.phase is not RoomPhase.CLOSING or entry.waiting_for:
            return
        del self._open[entry.id]
        self._closing.leave(entry.id)
        for facts in entry.workers:
            rooms = self._rooms_by_worker[facts.incarnation]
            del rooms[entry.id]
            if not rooms:
                del self._rooms_by_worker[facts.incarnation]
        self._enter(entry, RoomPhase.RETIRED)
        if entry.canary:
            table, limit = self._canaries, CANARY_ROOMS_FILED_MAX
        elif entry.has_failed:
            table, limit = self._failed, self.failed_max
        else:
            table, limit = self._done, self.done_max
        for forgotten in remember(table, entry.id, entry, limit):
            self.index.forgotten(forgotten)


def remember(table: OrderedDict[K, V], key: K, value: V, limit: int) -> list[V]:
    """Add a value to a table of at most `limit` entries. Return the values that were removed to make space,
    the oldest ones."""
    table[key] = value
    return [table.popitem(last=False)[1] for _ in range(len(table) - limit)]
