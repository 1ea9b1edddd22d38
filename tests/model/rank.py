"""World around one rank of either worker.

Its half of the hand-overs is the product's, and decides.

Here commands reach it, it takes turns, and what it asks is carried out. Left out: tensors, gRPC, and words
for people. Time stands still; a deadline that passes is an event.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Generic, TypeVar

from baton.handover.turn import Lap, Turn
from baton.ids import NO_OPENER, Incarnation, Opener, RoomId
from baton.pages.holdings import Holdings
from baton.pages.pool import PageState
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause, Reason, Refusal
from baton.rooms.evidence import Failed
from baton.rooms.phases import AnyEffect
from baton.rooms.request import Request
from baton.rooms.room import Room
from baton.rooms.roster import TOMBSTONE_MS, Roster
from tests.model.cast import Waits
from tests.model.laws import Broken, Law
from tests.model.standing import At, Standing

FAR: Final = Deadlines(*[1 << 40] * 6)
_PASSED: Final = Deadlines(*[0] * 6)

FIRST_OPENER: Final = Opener(1)
"""Bootstrap that opens every room, in scopes where bootstraps may die. The next ones have the next
numbers."""

Told = tuple[object, ...]
"""Facts about a request for the world."""
Done = tuple[RoomId, AnyEffect, Told]
"""Effect of a rank on a room in a turn, and the facts that it reported."""
TurnResult = tuple[tuple[Done, ...], tuple[str, ...]]
"""Effects of a rank in a turn, and the answers to the turn's connections."""

Met = tuple[tuple[Any, ...], ...]
"""Results of the collectives of a turn so far: the minimum of the ballots, then the causes of all ranks."""

R = TypeVar("R", bound=Room)


class Rank(ABC, Generic[R]):
    """`R`: its record of a room."""

    SEES: ClassVar[Reason]
    """Why a room fails that this rank alone sees fail."""
    side: Any
    """The rank's half of hand-overs."""

    def __init__(self, ranks: int, *, adopts: bool) -> None:
        """Make the rank. `ranks`: number of ranks of its worker. `adopts`: whether rooms have bootstraps that
        may die."""
        self._first_opener = FIRST_OPENER if adopts else NO_OPENER
        self._ranks = ranks
        self._ends_ms: int | None = None
        """Deadline of the request in milliseconds, or None."""
        self._step: list[Any] = []
        """Rows that the engine computes."""
        self._left = False
        self._opened: set[RoomId] = set()
        self._forgotten: set[RoomId] = set()
        self._cancelled: set[RoomId] = set()
        """Rooms that were cancelled before they were opened."""

    @property
    def _roster(self) -> Roster[R]:
        roster: Roster[R] = self.side.roster
        return roster

    @property
    def _holdings(self) -> Holdings:
        holdings: Holdings = self.side.holdings
        return holdings

    # ---- commands, the same on every rank

    def open(self, room: RoomId, peer: Incarnation, *about: Any) -> str:
        """Open a room, and return the reason of its refusal or an empty text, as all commands do. `about`:
        further facts for this side."""
        try:
            opened = self.side.open(
                room, self._asked(room), peer, 0, ends_ms=self._ends_ms, opener=self._first_opener
            )
        except Refusal as error:
            return type(error).__name__
        if room in self._cancelled and opened.cause is None:
            raise Broken(Law.CANCEL_REMEMBERED, f"room {room} was cancelled before it came, and it runs")
        self._opened.add(room)
        self._cancelled.discard(room)
        self._forgotten.discard(room)
        self._entered(opened, *about)
        self._carry_out()
        return ""

    def cancel(self, room: RoomId, reason: Reason, opener: Opener = NO_OPENER) -> str:
        self.side.cancel(room, self.cause(reason), 0, opener)
        self._remember(room)
        return ""

    def orphan(self, room: RoomId, opener: Opener) -> str:
        """The stream of the bootstrap that owns a room has broken."""
        self.side.orphan(room, opener, self.cause(Reason.BOOTSTRAP_LOST), 0)
        self._carry_out()
        return ""

    def adopt(self, room: RoomId, opener: Opener, term: int | None) -> str:
        try:
            self.side.adopt(room, opener, term)
        except Refusal as error:
            return type(error).__name__
        self._carry_out()
        return ""

    def depart(self, peer: Incarnation) -> str:
        self.side.depart(peer)
        self._carry_out()
        return ""

    def drain(self) -> str:
        self.side.drain()
        return ""

    def forget(self) -> str:
        """Expire what is remembered of rooms that are not here."""
        self._roster.forget_old(TOMBSTONE_MS)
        self._forgotten |= {room for room in self._opened if room not in self._roster}
        self._cancelled.clear()
        return ""

    def _remember(self, room: RoomId) -> None:
        if room not in self._opened:
            self._cancelled.add(room)

    # ---- what happens to this rank alone

    def fail(self, room: RoomId) -> str:
        """Note a failure that this rank sees, perhaps of a room that is over."""
        self.side.note(room, Failed(Cause(self.SEES, "seen here")))
        return ""

    # ---- a turn

    def turn(self, late: RoomId | None, *met: tuple[Any, ...]) -> Waits | TurnResult:
        """See, vote, take the verdict, act, compute. `late`: the room whose deadline has passed here. `met`:
        results of the turn's collectives so far. If one more is needed, the rank waits for the others."""
        with self._expired(late):
            turn = self._vote()
            if not met:
                return Waits(tuple(turn.ballot.encode()))
            turn.agree(list(met[0]))
            answers, done = self._agreed(turn.verdict.connects)
            causes = turn.causes()
            if causes is not None and len(met) == 1:
                return Waits(causes)
            moves = turn.settle(*met[1:])
        done += [(room.id, effect, self._perform(room, effect)) for room, effect in moves]
        if turn.computes:
            self._compute()
        self._left = turn.end(found=False, more=False) is Lap.LAST
        return tuple(done), answers

    def _vote(self) -> Turn[R]:
        self._observe()
        self._carry_out()
        side = self.side
        return Turn(
            0,
            self._roster,
            0,
            side.capacity(),
            ranks=self._ranks,
            may_compute=not self._step,
            may_leave=side.may_leave(),
            connects=self._connects(),
        )

    @contextmanager
    def _expired(self, room: RoomId | None) -> Iterator[None]:
        """Put `room` on this rank past its deadline for the length of one turn."""
        late = [each for each in self._roster if each.id == room]
        for each in late:
            each.deadlines = _PASSED
            each.orphan_until_ms = 0 if each.is_orphan else None
        yield
        for each in late:
            each.deadlines = FAR
            each.orphan_until_ms = FAR.orphan_ms if each.is_orphan else None

    def _carry_out(self) -> list[tuple[RoomId, Told]]:
        """Carry out the hand-over's requests. Returns facts for others, by room."""
        told: list[tuple[RoomId, Told]] = []
        while requests := self.side.take_requests():
            for request in requests:
                told += self._do(request)
        return told

    # ---- what it is

    def standing(self) -> Standing:
        roster = self._roster
        self._check_tables()
        here = {
            room.id: At(room.phase, room.cause, room.opener, room.term, room.is_orphan) for room in roster
        }
        past = frozenset(self._opened - here.keys() - self._forgotten)
        return Standing(here, past, self.nothing_held(), bool(self._step), self.side.draining, self._left)

    def _check_tables(self) -> None:
        """Check that every table has the same rooms (`one-retire`), and none that never came."""
        roster, holdings = self._roster, self._holdings
        here = {room.id for room in roster}
        strangers = here - self._opened
        if strangers:
            raise Broken(Law.ROOM_ISSUED, f"rooms {sorted(strangers)} are here and were never opened here")
        for room in self._opened:
            if room in holdings and room not in here:
                raise Broken(Law.ONE_RETIRE, f"room {room} has left the roster and still holds memory")
            if room not in here and not roster.retired(room) and room not in self._forgotten:
                raise Broken(Law.TERMINAL_CREATES_NOTHING, f"room {room} was retired, and that was forgotten")
        for each in roster:
            if each.cause is not None and each.cause.reason is Reason.RECORD_CORRUPT:
                raise Broken(
                    Law.SLOT_OWNER, f"room {each.id} sees a record that is not its own: {each.cause.text}"
                )
        if len(holdings) and not here:
            raise Broken(Law.ONE_RETIRE, "memory is held for no room")

    def nothing_held(self) -> bool:
        holdings = self._holdings
        pages, slots = holdings.census(), holdings.slots.census()
        return (
            len(self._roster) == len(holdings) == 0
            and pages[PageState.FREE] + pages[PageState.CACHED] == sum(holdings.sizes)
            and slots[PageState.FREE] == len(holdings.slots) == holdings.slots.free
        )

    # ---- what differs by side

    @abstractmethod
    def _asked(self, room: RoomId) -> Request:
        """Handle a request of the hand-over about a room."""

    def _entered(self, room: R, *about: Any) -> None:
        """Handle a room that has just been opened."""

    def cause(self, reason: Reason) -> Cause:
        """Return the cause with which a room is cancelled for this reason."""
        return Cause(reason, "as the world tells")

    @abstractmethod
    def _observe(self) -> None:
        """Collect evidence before a vote."""

    def _connects(self) -> int:
        """Return how many of the turn's connections this rank could make."""
        return 0

    @abstractmethod
    def _agreed(self, connects: int) -> tuple[tuple[str, ...], list[Done]]:
        """Act after the ranks have met. Returns the answers to the turn's connections, and what is done by
        that. `connects`: number of connections that every rank could make."""

    @abstractmethod
    def _perform(self, room: R, effect: Any) -> Told:
        """Perform a settled move. Returns facts for others."""

    @abstractmethod
    def _compute(self) -> None:
        """Compute the next step. Called when every rank's engine is free."""

    @abstractmethod
    def _do(self, request: Any) -> list[tuple[RoomId, Told]]:
        """Carry one request out."""
