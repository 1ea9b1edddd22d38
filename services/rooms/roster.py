"""Which rooms does this rank hold, what does it wish for each, and what became of the others?

The roster is a fixed table of places. Votes are keyed by place (`keyed-votes`), so that ranks which
hold the same rooms in the same places vote on the same things; the digest in the ballot tells in the
same collective when they do not (`divergence-detected`).

A room enters by `open` and leaves by `retire`, and by nothing else. News about a room that is not in
the table creates nothing: it is counted and dropped (`terminal-creates-nothing`), except a cancel,
which is remembered for a while in case its room is still on its way (`cancel-remembered`).
"""

import heapq
from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter, le
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

from baton.ids import Incarnation, PageCounts, RoomId
from baton.rooms.errors import Cause, LocalBug, Reason, RoomExists, RosterFull, UnknownRoom
from baton.rooms.evidence import Evidence, Failed
from baton.rooms.phases import Effect, Phase, Vote
from baton.rooms.room import Room

TOMBSTONES_MAX: Final = 4096
TOMBSTONE_MS: Final = 600_000
ROWS_MAX: Final = 2**62
"""More than there ever are."""
_PHASES: Final = tuple(Phase)
_NUMBERS: Final = {phase: number for number, phase in enumerate(Phase)}
_place: Final = attrgetter("place")
_urgency: Final = attrgetter("urgency")
_NO_REASONS: Final[Mapping[int, Reason]] = MappingProxyType({})

R = TypeVar("R", bound=Room)
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is remembered of a room that is not in the table."""

    until_ms: int
    cause: Cause | None
    """Set when the room was cancelled before it was opened."""


class Capacity(NamedTuple):
    """What could be reserved right now: the same numbers on every rank (`admission-agreed`)."""

    pages: PageCounts
    """Of each group."""
    slots: int
    prefixes: int = 0
    """Digest of which pages are known by which tokens."""
    margin: PageCounts = ()
    """Of each group: pages that are left for rooms that grow; () where none does."""
    rows: int = ROWS_MAX
    """Sequences of rooms that may begin: no room does once there is none left."""

    @property
    def free(self) -> PageCounts:
        """Pages for rooms that begin."""
        if not self.margin:
            return self.pages
        return tuple(max(count - left, 0) for count, left in zip(self.pages, self.margin, strict=True))


NOTHING: Final = Capacity((), 0)


class Roster(Generic[R]):
    """All rooms of one rank, on one side."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._free = list(range(places))
        self._rooms: dict[RoomId, R] = {}
        self._waiting: list[R] = []
        """For capacity, in the order of their urgency."""
        self._tombstones: OrderedDict[RoomId, Tombstone] = OrderedDict()
        self._given_up: OrderedDict[tuple[RoomId, Incarnation], Tombstone] = OrderedDict()
        """Rooms that have not come, each by the peer that gave it up: as many again."""
        self.dropped: Counter[str] = Counter()
        """News that was dropped, by kind of evidence."""

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[R]:
        """Rooms in the order in which they were opened."""
        return iter(list(self._rooms.values()))

    def __contains__(self, room: object) -> bool:
        return room in self._rooms

    def get(self, room: RoomId) -> R:
        if room not in self._rooms:
            raise UnknownRoom(f"room {room} is not known here")
        return self._rooms[room]

    def open(self, room: RoomId, make: Callable[[int], R], now_ms: int) -> R:
        """Enter a room that the registry opened. `make` gets its place.

        Raises RoomExists for an id that is or was here, RosterFull when every place is taken. A room
        that was cancelled before it came is entered with that cause, and so ends in its first turn.
        """
        self._forget_old(now_ms)
        grave = self._tombstones.get(room)
        if room in self._rooms or (grave is not None and grave.cause is None):
            raise RoomExists(f"room {room} is or was in use here")
        if not self._free:
            raise RosterFull(f"all {self.places} places for rooms are taken")
        place = self._free[0]
        opened = make(place)
        if (opened.id, opened.place) != (room, place):
            raise LocalBug(f"room {room} at place {place} was made as {opened.id} at {opened.place}")
        heapq.heappop(self._free)
        self._rooms[room] = opened
        if grave is not None and grave.cause is not None:
            del self._tombstones[room]
            opened.note(Failed(grave.cause))
        given_up = self._given_up.pop((room, opened.peer), None)
        if given_up is not None and given_up.cause is not None:
            opened.note(Failed(given_up.cause))
        return opened

    def note(self, room: RoomId, evidence: Evidence) -> bool:
        """Add a fact to a room. False, and nothing else, when the room is not here."""
        if room not in self._rooms:
            self.dropped[type(evidence).__name__] += 1
            return False
        self._rooms[room].note(evidence)
        return True

    def cancel(self, room: RoomId, cause: Cause, now_ms: int) -> bool:
        """End the room of exactly this id (`exact-match`) for a reason from outside. Unknown rooms are
        remembered, retired ones are not."""
        if room in self._rooms:
            self._rooms[room].note(Failed(cause))
            return True
        if room not in self._tombstones:
            self._bury(room, Tombstone(now_ms + TOMBSTONE_MS, cause))
        return False

    def give_up(self, room: RoomId, peer: Incarnation, cause: Cause, now_ms: int) -> None:
        """The same by a peer of this worker, which ends its own rooms alone (`authorised-writer`): of one
        that comes later it is known then whose it is."""
        here = self._rooms.get(room)
        if here is not None:
            if here.peer == peer:
                here.note(Failed(cause))
        elif not self.retired(room) and (room, peer) not in self._given_up:
            _bury(self._given_up, (room, peer), Tombstone(now_ms + TOMBSTONE_MS, cause))

    def votes(self, now_ms: int, capacity: Capacity) -> list[Vote]:
        """One vote per place; STAY where a place is empty.

        Capacity goes to waiting rooms in the order of their urgency, and the first that does not fit stops
        those behind it, so that a large request is not overtaken for ever. Whatever is blocked, every room's
        failure is voted in every turn (`no-starvation`).
        """
        votes = [Vote.STAY] * self.places
        fitting = self._fitting(capacity)
        for room in self._rooms.values():
            votes[room.place] = room.vote(now_ms, has_capacity=room.id in fitting)
        return votes

    def _fitting(self, capacity: Capacity) -> Set[RoomId]:
        """Waiting rooms that there is capacity for, all of them together: what each leaves for its own growth
        is nobody else's."""
        fitting: set[RoomId] = set()
        pages, rows = capacity.free, capacity.rows
        for room in self._waiting:
            if room.cause is not None:
                continue
            if len(fitting) == capacity.slots or rows <= 0 or not all(map(le, room.pages_needed, pages)):
                break
            taken = zip(pages, room.pages_needed, room.margin, strict=True)
            pages = tuple(count - needed - left for count, needed, left in taken)
            rows -= room.rows
            fitting.add(room.id)
        return fitting

    def reasons(self, now_ms: int, votes: Sequence[Vote]) -> dict[int, Reason]:
        """Why this rank votes for rooms to end early, by place: the ranks that do not know are told."""
        if Vote.ABORT not in votes:
            return {}
        ended = (room for room in self._rooms.values() if votes[room.place] is Vote.ABORT)
        endings = ((room.place, room.ending(now_ms)) for room in ended)
        return {place: cause.reason for place, cause in endings if cause is not None}

    def settle(
        self, verdicts: Sequence[Vote], now_ms: int, reasons: Mapping[int, Reason] = _NO_REASONS
    ) -> list[tuple[R, Any]]:
        """Make every room's agreed move. `now_ms`: the same as for `votes`; `reasons`: as agreed.

        Each comes with an effect of the room's side (`baton.rooms.phases`).

        A room whose effect is RELEASE is still here: `retire` it in the same turn.
        """
        effects = []
        for room in self._rooms.values():
            verdict, before = verdicts[room.place], room.phase
            if verdict is Vote.STAY:
                continue
            effect = room.settle(verdict, now_ms, reasons.get(room.place))
            if effect is not None:
                effects.append((room, effect))
                if effect is Effect.QUEUE or before is Phase.WAITING_FOR_INPUT:
                    self._queue(room, waits=effect is Effect.QUEUE)
        return effects

    def retire(self, room: RoomId, now_ms: int) -> bool:
        """The only way out. Idempotent; False when the room had left before."""
        gone = self._rooms.pop(room, None)
        if gone is None:
            return False
        self._queue(gone, waits=False)
        heapq.heappush(self._free, gone.place)
        self._bury(room, Tombstone(now_ms + TOMBSTONE_MS, None))
        return True

    def retired(self, room: RoomId) -> bool:
        """Whether the room was here and has left, as far back as tombstones reach."""
        grave = self._tombstones.get(room)
        return grave is not None and grave.cause is None

    def census(self) -> Mapping[Phase, int]:
        """Rooms by phase, every phase named."""
        count = dict.fromkeys(_PHASES, 0)
        for room in self._rooms.values():
            count[room.phase] += 1
        return count

    def digest(self, capacity: Capacity = NOTHING) -> int:
        """62 bits that differ, but for chance, when two ranks' tables differ in who sits where, or how, or
        in what they could reserve or reuse."""
        words = [*capacity.pages, capacity.slots, capacity.prefixes, *capacity.margin, capacity.rows]
        for room in sorted(self._rooms.values(), key=_place):
            words += (room.place, room.id, _NUMBERS[room.phase], room.stopping)
        return int.from_bytes(blake2b(array("Q", words), digest_size=8).digest(), "little") >> 2

    def _queue(self, room: R, *, waits: bool) -> None:
        """A room moved: it waits for capacity from now on, or not any more."""
        if waits:
            insort(self._waiting, room, key=_urgency)
            return
        at = bisect_left(self._waiting, room.urgency, key=_urgency)
        if at < len(self._waiting) and self._waiting[at] is room:
            del self._waiting[at]

    def _bury(self, room: RoomId, grave: Tombstone) -> None:
        _bury(self._tombstones, room, grave)

    def _forget_old(self, now_ms: int) -> None:
        _forget_old(self._tombstones, now_ms)
        _forget_old(self._given_up, now_ms)


def _bury(graves: OrderedDict[K, Tombstone], whose: K, grave: Tombstone) -> None:
    graves[whose] = grave
    while len(graves) > TOMBSTONES_MAX:
        graves.popitem(last=False)


def _forget_old(graves: OrderedDict[K, Tombstone], now_ms: int) -> None:
    while graves:
        whose, grave = next(iter(graves.items()))
        if grave.until_ms > now_ms:
            return
        del graves[whose]
