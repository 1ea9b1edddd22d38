"""Facts about a rank that are known without asking the product again.

Taken once of every distinct rank: where its rooms are, whether what it holds fits together, and what its
memory truly says. What two ranks or two moments must have in common is compared with these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from baton.ids import NO_OPENER, Incarnation, Opener, RoomId
from baton.rooms.errors import Cause
from baton.rooms.phases import Phase
from tests.model.flights import Flight
from tests.model.laws import Broken, Law

Place = tuple[str, int]
"""Place in a receiver's memory: page or slot, and its number."""


@dataclass(frozen=True, slots=True)
class At:
    """State of one room on one rank."""

    phase: Phase
    cause: Cause | None
    opener: Opener = NO_OPENER
    term: int = 0
    orphan: bool = False
    """Whether other bootstraps may adopt the room."""


@dataclass(frozen=True, slots=True)
class Standing:
    rooms: Mapping[RoomId, At]
    past: frozenset[RoomId]
    """Rooms that were here once and have left."""
    idle: bool
    """Whether nothing is held and every count is what it was at the start."""
    stepping: bool
    draining: bool
    left: bool
    """Whether all ranks agreed to leave."""
    flying: tuple[Flight, ...] = ()
    """Sender: writes that may still land."""
    owing: frozenset[RoomId] = frozenset()
    """Sender: rooms that run here, and whose pages this rank has not all computed, or could not write."""
    exposure: Incarnation | None = None
    """Receiver: under which its memory is known now."""
    reached_by: frozenset[Incarnation] = frozenset()
    """Receiver: exposures by which its memory can be written."""
    revoking: bool = False
    overdue: bool = False
    """Receiver: whether some room's memory waits for a proof, so that it is revoked in time."""
    held: Mapping[Place, tuple[RoomId, int, bool]] = field(default_factory=dict)
    """Receiver: each held place's room and generation, and whether a peer may write there."""
    tables: Sequence[tuple[RoomId, Sequence[int], bool]] = ()
    """Receiver: each room's pages, and whether it is retracted."""
    local: frozenset[RoomId] = frozenset()
    """Receiver: rooms that are computed here."""
    answered: frozenset[RoomId] = frozenset()
    """Receiver: rooms whose opener was sent all tokens and the outcome."""
    sealed: frozenset[RoomId] = frozenset()
    """Receiver: rooms whose seal is there, as the memory itself says."""
    landed: frozenset[RoomId] = frozenset()
    """Receiver: rooms whose every page is there, and their seals where they are not computed here, as the
    memory itself says."""

    def at(self, room: RoomId) -> At | None:
        return self.rooms.get(room)

    def over(self, room: RoomId) -> bool:
        """Return whether no further news of the room can make a difference."""
        at = self.rooms.get(room)
        return room in self.past if at is None else at.phase is Phase.FAILED


NEWS: Final = frozenset({"fail", "grant", "quiet", "cancel", "close", "end_choice"})
"""Deeds that tell of one room."""

REMEMBERED: Final = frozenset({"cancel", "close"})
"""Commands that are remembered for a room that has not come yet."""


def check_step(before: Standing, after: Standing, did: tuple[Any, ...]) -> None:
    """Check what no single deed may do to a rank's rooms, if the deed left a trace."""
    deed = did[0]
    if deed in NEWS:
        _check_news(before, deed, did[1])
    for room, was in before.rooms.items():
        now = after.rooms.get(room)
        if now is not None:
            _check_move(room, was, now, deed)
            _check_owner(room, was, now, did)
        elif deed != "turn" or was.phase not in (Phase.SUCCESS, Phase.FAILED):
            raise Broken(Law.ONE_RETIRE, f"room {room} is gone from {was.phase.value} by a {deed}")
    for room in after.rooms.keys() - before.rooms.keys():
        if room in before.past:
            raise Broken(Law.TERMINAL_CREATES_NOTHING, f"room {room} came back by a {deed}")
        if deed != "open":
            raise Broken(Law.ROOM_ISSUED, f"room {room} was made by a {deed}")


def _check_news(before: Standing, deed: str, room: RoomId) -> None:
    """Check that a report about a room leaves a trace in that room alone."""
    if room in before.past:
        raise Broken(Law.TERMINAL_CREATES_NOTHING, f"room {room} is over, and a late {deed} left a trace")
    if room not in before.rooms and deed not in REMEMBERED:
        raise Broken(Law.ROOM_ISSUED, f"room {room} is unknown, and a {deed} left a trace")


def _check_owner(room: RoomId, was: At, now: At, did: tuple[Any, ...]) -> None:
    """Check that a room obeys its bootstrap alone, and gets another one by an adoption only."""
    deed, *about = did
    if now.opener != was.opener or now.term != was.term:
        if deed != "adopt" or now.opener != about[1]:
            raise Broken(Law.OPENER_OWNS, f"room {room} got bootstrap {now.opener} by a {deed}")
        if now.term <= was.term:
            raise Broken(Law.ADOPT_FIRST_WINS, f"room {room} was adopted again in term {now.term}")
        if now.orphan:
            raise Broken(Law.ORPHAN_ENDS, f"room {room} was adopted, and ends as an orphan")
    is_foreign = deed in ("cancel", "orphan") and now.opener not in (about[-1], NO_OPENER)
    if is_foreign and (now.cause, now.orphan) != (was.cause, was.orphan):
        raise Broken(Law.OPENER_OWNS, f"room {room} of bootstrap {now.opener} obeys {deed} of {about[-1]}")


def _check_move(room: RoomId, was: At, now: At, deed: str) -> None:
    if was.cause is not None and now.cause != was.cause:
        raise Broken(Law.FIRST_CAUSE_WINS, f"room {room}: {was.cause} became {now.cause}")
    if now.phase is not was.phase:
        if deed != "turn":
            raise Broken(Law.APPLY_VERDICT, f"room {room} went to {now.phase.value} by a {deed}")
        if was.phase in (Phase.SUCCESS, Phase.FAILED):
            raise Broken(Law.TERMINAL_ABSORBS, f"room {room}: {was.phase.value} to {now.phase.value}")
    if now.phase is Phase.FAILED and now.cause is None:
        raise Broken(Law.FIRST_CAUSE_WINS, f"room {room} failed without a cause")
