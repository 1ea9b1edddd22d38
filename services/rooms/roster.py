"""Roster: table of the rooms on one rank, with their votes and with tombstones of former rooms.

The table has a fixed size. Votes are keyed by index (`keyed-votes`), so ranks with the same rooms at the same
indices vote on the same rooms. If their tables differ, the digest in the ballot shows it in the same
collective (`divergence-detected`).

A room enters by `open` and leaves by `retire` only. Evidence about a room that is not in the table is counted
and dropped (`terminal-creates-nothing`). A cancel of an unknown room is remembered for a while, in case the
room arrives later (`cancel-remembered`). The key of a room is its id alone. A command of another router than
the one that opened the room is counted and dropped (`opener-owns`).

If the stream of a room's router breaks, the room is an orphan for a while, and goes on. Another router may
adopt it. Commands pass in one order, so the first one that adopts a room gets it (`adopt-first-wins`). The
former router's later commands are dropped like those of any other.
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

from baton.ids import NO_OPENER, Incarnation, Opener, PageCounts, RoomId
from baton.rooms.errors import Cause, LocalBug, NotOrphaned, Reason, RoomExists, RosterFull, UnknownRoom
from baton.rooms.evidence import Evidence, Failed
from baton.rooms.phases import Effect, Phase, Vote
from baton.rooms.room import Room

TOMBSTONES_MAX: Final = 4096
TOMBSTONE_MS: Final = 600_000
ROWS_MAX: Final = 2**62
"""Value of `Capacity.rows` if the number of sequences is not limited."""
ORPHAN: Final = "orphan"
"""Kind under which `Roster.dropped` counts broken streams of rooms that are not in the roster."""
FOREIGN: Final = "foreign"
"""Kind under which `Roster.dropped` counts commands about a room that another router opened."""
_PHASES: Final = tuple(Phase)
_NUMBERS: Final = {phase: number for number, phase in enumerate(Phase)}
_index: Final = attrgetter("index")
_urgency: Final = attrgetter("urgency")
_NO_REASONS: Final[Mapping[int, Reason]] = MappingProxyType({})

R = TypeVar("R", bound=Room)
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Record of a room that is not in the roster: it has left, or it was cancelled before it was opened."""

    until_ms: int
    cause: Cause | None
    """Cause that the cancel gave, if the room was cancelled before it was opened. None if the room has
    left."""


class Capacity(NamedTuple):
    """Numbers of pages, slots and sequences (rows) that new rooms could take now. They are equal on every
    rank (`admission-agreed`)."""

    pages: PageCounts
    """Number of free pages, by KV group."""
    slots: int
    prefixes: int = 0
    """Digest of the prefix cache's contents. Ranks compare it to find differences between their caches."""
    margin: PageCounts = ()
    """Number of free pages that new rooms must leave for rooms that grow, by KV group. () if none grows."""
    rows: int = ROWS_MAX
    """Number of further sequences that may begin. If it is 0, no room begins."""

    @property
    def free(self) -> PageCounts:
        """Number of pages that are left for new rooms, by KV group."""
        if not self.margin:
            return self.pages
        return tuple(max(count - left, 0) for count, left in zip(self.pages, self.margin, strict=True))


NOTHING: Final = Capacity((), 0)


class Roster(Generic[R]):
    """Roster of all rooms on one rank of one side."""

    def __init__(self, size: int) -> None:
        """Make an empty roster. `size`: most rooms at a time."""
        self.size = size
        self._free = list(range(size))
        self._rooms: dict[RoomId, R] = {}
        self._waiting: list[R] = []
        """Rooms that wait for capacity, the most urgent first."""
        self._tombstones: OrderedDict[RoomId, Tombstone] = OrderedDict()
        """Tombstones of rooms that have left, by room. There are at most TOMBSTONES_MAX."""
        self._cancelled: OrderedDict[tuple[RoomId, Opener], Tombstone] = OrderedDict()
        """Tombstones of rooms that their router cancelled before they were opened on this rank, by room and
        router. There are at most TOMBSTONES_MAX."""
        self._given_up: OrderedDict[tuple[RoomId, Incarnation], Tombstone] = OrderedDict()
        """Tombstones of rooms that a peer cancelled before they were opened on this rank, by room and peer.
        There are at most TOMBSTONES_MAX."""
        self.orphaned = 0
        """Number of times that the stream of a room's router broke, and the room went on."""
        self.adopted = 0
        """Number of rooms that another router has adopted."""
        self.dropped: Counter[str] = Counter()
        """Number of pieces of evidence and commands that were dropped, by kind, because their room is not in
        this roster, or was opened by another router (FOREIGN)."""

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[R]:
        """Yield rooms in the order in which they were opened."""
        return iter(list(self._rooms.values()))

    def __contains__(self, room: object) -> bool:
        return room in self._rooms

    def get(self, room: RoomId) -> R:
        if room not in self._rooms:
            raise UnknownRoom(f"room {room} is not known here")
        return self._rooms[room]

    def open(self, room: RoomId, make: Callable[[int], R], now_ms: int) -> R:
        """Enter a new room into the roster. `make` builds it from its index.

        A room that was cancelled before it arrived is entered with that cause, and ends in its first turn.
        Raises RoomExists for an id that is or was here, whichever router opened it, and RosterFull if the
        table is full.
        """
        self.forget_old(now_ms)
        if room in self._rooms or room in self._tombstones:
            raise RoomExists(f"room {room} is or was in use here")
        if not self._free:
            raise RosterFull(f"all {self.size} places for rooms are taken")
        place = self._free[0]
        opened = make(place)
        if (opened.id, opened.index) != (room, place):
            raise LocalBug(f"room {room} at place {place} was made as {opened.id} at {opened.index}")
        heapq.heappop(self._free)
        self._rooms[room] = opened
        for grave in (
            self._cancelled.pop((room, opened.opener), None),
            self._given_up.pop((room, opened.peer), None),
        ):
            if grave is not None and grave.cause is not None:
                opened.note(Failed(grave.cause))
        return opened

    def note(self, room: RoomId, evidence: Evidence) -> bool:
        """Add evidence to a room. Return False if the room is not in this roster."""
        if room not in self._rooms:
            self.dropped[type(evidence).__name__] += 1
            return False
        self._rooms[room].note(evidence)
        return True

    def cancel(self, room: RoomId, cause: Cause, now_ms: int, opener: Opener = NO_OPENER) -> bool:
        """End the room of exactly this id (`exact-match`), because its opener or this worker wants it to end.
        Return whether the room of that opener is here.

        A cancel of an unknown room is remembered for that opener. A cancel of a retired room is not.
        """
        if self.is_foreign(room, opener):
            return False
        if room in self._rooms:
            self._rooms[room].note(Failed(cause))
            return True
        if room not in self._tombstones and (room, opener) not in self._cancelled:
            _bury(self._cancelled, (room, opener), Tombstone(now_ms + TOMBSTONE_MS, cause))
        return False

    def is_foreign(self, room: RoomId, opener: Opener) -> bool:
        """Return whether a command comes from another router than the one that opened the room
        (`opener-owns`). Such a command is counted here, and the caller drops it."""
        here = self._rooms.get(room)
        if here is None or here.obeys(opener):
            return False
        self.dropped[FOREIGN] += 1
        return True

    def orphan(self, room: RoomId, opener: Opener, until_ms: int) -> bool:
        """Let other routers adopt a room, because the stream of its router broke. Return whether the room of
        that router is here.

        `until_ms`: time at which the room ends if none has adopted it, in milliseconds (`orphan-ends`).
        """
        if self.is_foreign(room, opener):
            return False
        if room not in self._rooms:
            self.dropped[ORPHAN] += 1
            return False
        self._rooms[room].orphan_until_ms = until_ms
        self.orphaned += 1
        return True

    def adopt(self, room: RoomId, opener: Opener, term: int | None = None) -> R:
        """Give an orphan to a router, which owns it from now on. Return the room.

        `term`: term of the adoption at the room's other worker, where it was decided. None: it is decided
        here. Raises UnknownRoom, and NotOrphaned if the room has a router or is ending.
        """
        adopted = self.get(room)
        is_given = adopted.is_orphan if term is None else term > adopted.term
        if not is_given or not adopted.is_adoptable:
            raise NotOrphaned(f"room {room} has a bootstrap that reads it, or is ending")
        self.adopted += 1
        adopted.opener, adopted.orphan_until_ms = opener, None
        adopted.term = adopted.term + 1 if term is None else term
        return adopted

    def cancel_by_peer(self, room: RoomId, peer: Incarnation, cause: Cause, now_ms: int) -> None:
        """End a room at the request of a peer, which may end only rooms that it shares (`authorised-writer`).
        If the room is not here yet, the cancel is remembered, and the peer is compared when the room
        arrives."""
        here = self._rooms.get(room)
        if here is not None:
            if here.peer == peer:
                here.note(Failed(cause))
        elif not self.retired(room) and (room, peer) not in self._given_up:
            _bury(self._given_up, (room, peer), Tombstone(now_ms + TOMBSTONE_MS, cause))

    def votes(self, now_ms: int, capacity: Capacity) -> list[Vote]:
        """Return this rank's vote for each index of the table; STAY for a free index.

        Capacity goes to waiting rooms in the order of their urgency. The first that does not fit blocks those
        after it, so that small requests do not overtake it again and again. Blocked rooms that have failed
        are voted out all the same (`no-starvation`).
        """
        votes = [Vote.STAY] * self.size
        fitting = self._fitting(capacity)
        for room in self._rooms.values():
            votes[room.index] = room.vote(now_ms, has_capacity=room.id in fitting)
        return votes

    def _fitting(self, capacity: Capacity) -> Set[RoomId]:
        """Return the ids of those waiting rooms that fit together into the free capacity. Pages that one room
        has to leave free for its growth are not given to another."""
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
        """Return the reasons of this rank's votes to end rooms (ABORT), by the room's index. Ranks that have
        seen no cause learn them."""
        if Vote.ABORT not in votes:
            return {}
        ended = (room for room in self._rooms.values() if votes[room.index] is Vote.ABORT)
        endings = ((room.index, room.ending(now_ms)) for room in ended)
        return {place: cause.reason for place, cause in endings if cause is not None}

    def settle(
        self, verdicts: Sequence[Vote], now_ms: int, reasons: Mapping[int, Reason] = _NO_REASONS
    ) -> list[tuple[R, Any]]:
        """Move each room as all ranks agreed. Return the rooms whose move has an effect, with the effect,
        which the caller has to carry out.

        `now_ms`: the same as for `votes`. `reasons`: agreed reasons of ABORTs, by index of the room. The
        effects are those of the room's side (`baton.rooms.phases`). A room with the effect RELEASE is still
        here: the caller has to `retire` it in the same turn.
        """
        effects = []
        for room in self._rooms.values():
            verdict, before = verdicts[room.index], room.phase
            if verdict is Vote.STAY:
                continue
            effect = room.settle(verdict, now_ms, reasons.get(room.index))
            if effect is not None:
                effects.append((room, effect))
                if effect is Effect.QUEUE or before is Phase.WAITING_FOR_INPUT:
                    self._queue(room, waits=effect is Effect.QUEUE)
        return effects

    def retire(self, room: RoomId, now_ms: int) -> bool:
        """Remove a room from the roster. No room leaves in another way. Return False if it has left
        before."""
        gone = self._rooms.pop(room, None)
        if gone is None:
            return False
        self._queue(gone, waits=False)
        heapq.heappush(self._free, gone.index)
        _bury(self._tombstones, room, Tombstone(now_ms + TOMBSTONE_MS, None))
        return True

    def retired(self, room: RoomId) -> bool:
        """Return whether a room was in this roster and has left. After its tombstone has expired, the roster
        no longer knows."""
        return room in self._tombstones

    def census(self) -> Mapping[Phase, int]:
        """Return the number of rooms in each phase."""
        count = dict.fromkeys(_PHASES, 0)
        for room in self._rooms.values():
            count[room.phase] += 1
        return count

    def digest(self, capacity: Capacity = NOTHING) -> int:
        """Return a digest of 62 bits, by which ranks compare their tables. It differs, except by chance, if
        rooms, phases or capacity differ."""
        words = [*capacity.pages, capacity.slots, capacity.prefixes, *capacity.margin, capacity.rows]
        for room in sorted(self._rooms.values(), key=_index):
            words += (room.index, room.id, _NUMBERS[room.phase], room.stopping)
        return int.from_bytes(blake2b(array("Q", words), digest_size=8).digest(), "little") >> 2

    def _queue(self, room: R, *, waits: bool) -> None:
        """Add a room to the list of waiting rooms if it waits for capacity. Otherwise remove it from the
        list."""
        if waits:
            insort(self._waiting, room, key=_urgency)
            return
        at = bisect_left(self._waiting, room.urgency, key=_urgency)
        if at < len(self._waiting) and self._waiting[at] is room:
            del self._waiting[at]

    def forget_old(self, now_ms: int) -> None:
        """Remove tombstones that have expired."""
        _forget_old(self._tombstones, now_ms)
        _forget_old(self._cancelled, now_ms)
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
