"""The bootstrap's registry in the model.

The product's own `Registry`, on one pair of workers.

Time stands still here, too: what waits for it (a room that is not reported retired, one whose opener is
gone) is asked about as if it had passed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from baton.fleet.need import Need
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomPhase
from baton.fleet.room_table import CLOSING_MS, OPEN_MS_MAX, OUTCOME_MS
from baton.handover.opener_messages import ANSWERED
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, NoCapacity, NoSuchWorker, Reason
from baton.rooms.phases import Side
from baton.rooms.worker_facts import StackFacts, WorkerFacts
from tests.model.laws import Broken, Law
from tests.model.scopes import Scope

SIDES: Final = (Side.PREFILL, Side.DECODE)
MODEL: Final = "model"
NEED: Final = Need(1, 1)
NAMESAKE: Final = Incarnation(1000)
"""A process that has a worker's name, and is not that worker."""


@dataclass(frozen=True, slots=True)
class Written:
    """Entry of the registry about one room."""

    phase: RoomPhase
    cause: Cause | None
    tables: int
    """Number of the registry's tables that hold the room."""


@dataclass(frozen=True, slots=True)
class BookStanding:
    rooms: Mapping[RoomId, Written]
    idle: bool
    """Whether no room is open and no worker is charged with one."""
    holders: frozenset[tuple[int, Incarnation]]
    """Workers that hold a lease, as (side, incarnation)."""
    overdue: bool
    """Whether some room has ended and not every worker has reported it retired."""
    departed: frozenset[tuple[int, Incarnation]]
    """Workers whose process is believed gone, as (side, incarnation). Others reuse memory on that belief."""


class Book:
    def __init__(self, scope: Scope) -> None:
        self._registry = Registry(MODEL, 1, 1, done_max=scope.rooms, failed_max=scope.rooms)
        self._places = scope.rooms
        self._issued: set[RoomId] = set()
        for side in range(len(SIDES)):
            self.join(side, Incarnation(1))

    # ---- workers

    def join(self, side: int, incarnation: Incarnation) -> tuple[tuple[RoomId, Reason], ...]:
        """Register a worker of this side that has a lease and has passed a canary. Returns the rooms whose
        end it may not know, with the reasons."""
        facts = self._facts(side, incarnation)
        self._registry.register(facts, 0)
        self._registry.mark_proven(facts.incarnation)
        ends = self._registry.ends_to_resend(facts)
        return tuple((each.id, (each.cause or ANSWERED).reason) for each in ends)

    def lose(
        self, side: int, incarnation: Incarnation, proof: str | None
    ) -> tuple[tuple[RoomId, Reason], ...]:
        """Lose a worker, and return the open rooms that it had, with the reason for which each ends."""
        if proof == "exited" and self._registry.facts_of(_named(side, incarnation)) is not None:
            ended = self._exited(side, incarnation, _starters_digest(_named(side, incarnation)))
            if ended != [_named(side, incarnation)]:
                raise Broken(Law.EXIT_BY_STARTER, f"{SIDES[side].value}'s starter is not believed")
        reason = self._facts(side, incarnation).loss("as the world tells").reason
        return tuple((each.id, reason) for each in self._registry.leave(_named(side, incarnation), proof, 0))

    def report(self, side: int, incarnation: Incarnation) -> str:
        """Report a worker's exit without a secret, and with the secret of another process's starter."""
        for digest in (b"", _starters_digest(_named(1 - side, incarnation))):
            for each in self._exited(side, incarnation, digest):
                self._registry.leave(each, "exited", 0)
        return ""

    def namesake(self, side: int) -> str:
        """Register another process by the name of a worker that fell silent, and let it fall silent, too."""
        facts = self._facts(side, NAMESAKE)
        self._registry.register(facts, 0)
        self._registry.leave(facts.incarnation, None, 0)
        return ""

    def _exited(self, side: int, incarnation: Incarnation, digest: bytes) -> list[Incarnation]:
        return self._registry.exited(SIDES[side].value, _named(side, incarnation), digest)

    def drain(self, side: int, incarnation: Incarnation) -> str:
        self._registry.drain(_named(side, incarnation))
        return ""

    def charged(self, side: int, incarnation: Incarnation) -> int:
        """Return the number of rooms that the registry still charges to the worker."""
        return len(self._registry.worker(_named(side, incarnation)).rooms)

    # ---- rooms

    def open(self) -> RoomId | None:
        try:
            entry = self._registry.open_room("request", self._registry.place(NEED), NEED, 0)
        except (NoSuchWorker, NoCapacity):
            return None
        if entry.id in self._issued or entry.id < 1:
            raise Broken(Law.ROOM_UNIQUE, f"room {entry.id} was issued before")
        self._issued.add(entry.id)
        self._registry.mark_delivered(entry.id, SIDES)
        return entry.id

    def end(self, room: RoomId, reason: Reason | None) -> bool:
        """End the room. Returns False if it had ended before."""
        return self._registry.end(room, None if reason is None else Cause(reason, "as the world tells"), 0)

    def sides_to_end(self, room: RoomId) -> tuple[int, ...]:
        """Return the sides whose workers have to be sent the room's end."""
        return tuple(map(SIDES.index, self._registry.sides_to_end(self._registry.get(room))))

    def mark_local(self, room: RoomId) -> str:
        self._registry.mark_local(room)
        return ""

    def retired(self, room: RoomId, side: int) -> str:
        """Report a room retired by a worker, perhaps twice or late."""
        self._registry.side_retired(room, SIDES[side])
        return ""

    def untold(self) -> tuple[RoomId, ...]:
        """Return rooms whose opener says nothing: those that both workers gave back, or else those that have
        been open too long."""
        self._registry.orphans(0)
        rooms = self._registry.orphans(OUTCOME_MS) or self._registry.orphans(OPEN_MS_MAX)
        return tuple(entry.id for entry in rooms)

    def abandon(self) -> str:
        """Abandon rooms that ended and were not reported retired for as long as the registry waits."""
        for entry in self._registry.overdue(CLOSING_MS):
            self._registry.abandon(entry.id)
        return ""

    # ---- what it is

    def standing(self) -> BookStanding:
        registry = self._registry
        tables = Counter(entry.id for entry in registry.rooms())
        rooms = {entry.id: Written(entry.phase, entry.cause, tables[entry.id]) for entry in registry.rooms()}
        unfiled = {entry.id for entry in registry.open_rooms()}
        strangers = rooms.keys() - self._issued
        if strangers:
            raise Broken(
                Law.ROOM_ISSUED, f"the registry knows rooms {sorted(strangers)} that it never opened"
            )
        for worker in registry.workers():
            if not worker.rooms <= unfiled:
                raise Broken(Law.ZERO_AT_IDLE, f"{worker.facts.name} is charged with rooms that are filed")
            if worker.tokens != len(worker.rooms):
                raise Broken(Law.ZERO_AT_IDLE, f"{worker.facts.name} is charged with {worker.tokens} tokens")
        charged = any(worker.rooms for worker in registry.workers())
        overdue = any(entry.phase is RoomPhase.CLOSING for entry in registry.open_rooms())
        holders = frozenset(
            (worker.facts.incarnation % 2, Incarnation(worker.facts.incarnation // 2))
            for worker in registry.workers()
        )
        departed = frozenset((gone % 2, Incarnation(gone // 2)) for gone in registry.departed())
        return BookStanding(rooms, not unfiled and not charged, holders, overdue, departed)

    def _facts(self, side: int, incarnation: Incarnation) -> WorkerFacts:
        name = SIDES[side].value
        return WorkerFacts(
            name,
            SIDES[side],
            _named(side, incarnation),
            name,
            MODEL,
            StackFacts(),
            self._places,
            self._places,
            pid=_named(side, incarnation),
            exit_digest=_starters_digest(_named(side, incarnation)),
        )


def _named(side: int, incarnation: Incarnation) -> Incarnation:
    """Unique over both sides."""
    return Incarnation(2 * incarnation + side)


def _starters_digest(incarnation: Incarnation) -> bytes:
    """Digest of the secret that the starter of a worker's process shows."""
    return b"of the starter of %d" % incarnation


_ORDER: Final = (RoomPhase.OPEN, RoomPhase.STREAMING, RoomPhase.CLOSING, RoomPhase.RETIRED)


def check_book(before: BookStanding, after: BookStanding, did: tuple[Any, ...]) -> None:
    proven = did[0] == "lose" and did[-1] is not None
    for side, incarnation in () if proven else after.departed - before.departed:
        text = f"{SIDES[side].value} worker {incarnation} is taken for gone by a {did[0]}"
        raise Broken(Law.EXIT_BY_STARTER, text)
    for room, was in before.rooms.items():
        now = after.rooms.get(room)
        if now is None:
            raise Broken(Law.ONE_RETIRE, f"the registry forgot room {room} by a {did[0]}")
        if now.tables != 1:
            raise Broken(Law.ONE_RETIRE, f"room {room} is in {now.tables} of the registry's tables")
        if _ORDER.index(now.phase) < _ORDER.index(was.phase):
            raise Broken(Law.TERMINAL_ABSORBS, f"room {room}: {was.phase.value} to {now.phase.value}")
        over = was.phase in (RoomPhase.CLOSING, RoomPhase.RETIRED)
        if over and now.cause != was.cause:
            raise Broken(Law.FIRST_CAUSE_WINS, f"room {room}: {was.cause} became {now.cause} by a {did[0]}")
    for room in after.rooms.keys() - before.rooms.keys():
        if did[0] != "open":
            raise Broken(Law.ROOM_ISSUED, f"the registry made room {room} by a {did[0]}")
