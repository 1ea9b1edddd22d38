"""Room on one rank: its phase, the evidence observed, and the vote of the rank.

The prefill and the decode side differ in which evidence they accept and when they are ready. Moves,
deadlines, causes and the way to the end are the same, so they are in this module.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Final

from baton.ids import NO_OPENER, Incarnation, Opener, PageCounts, RoomId
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause, IllegalMove, LocalBug, Reason
from baton.rooms.evidence import Compiled, Evidence, Failed, Fenced, Finished, Proof
from baton.rooms.phases import GATED, AnyEffect, Moves, Phase, Side, Vote

NOT_COMPILED: Final = "the grammar of its answer is not compiled"
"""Text that says what a room waits for whose grammar is still being compiled."""


@dataclass(slots=True, eq=False)
class Room(ABC):
    """Base class of a room on one rank: a `Sender` on prefill, or a `Receiver` on decode. Made by
    `Roster.open` alone.

    Invariants:

    * `terminal-absorbs`: from SUCCESS or FAILED, the phase changes to RETIRED only.
    * `first-cause-wins`: `cause` is set at most once, and a room in FAILED has one.
    * `failure-is-agreed`: a cause that one rank alone knows ends the room on every rank, in every phase.
    * `cause-dies-with-room`: the cause is part of this record, and nothing else remembers it.
    * `fresh-attempt`: a retry is another room, which starts in BOOTSTRAPPING like any other.
    * `apply-verdict`: `phase` changes in `settle` alone, never in `note` or `vote`.
    * `waiting-has-no-deadline`: in a phase that waits for capacity, only the request's own time-out is a
      deadline.
    """

    SIDE: ClassVar[Side]
    MOVES: ClassVar[Moves]
    WAITS: ClassVar[frozenset[Phase]]
    """Phases that may last because the room waits for capacity, on this worker or at the peer."""

    id: RoomId
    request_id: str
    peer: Incarnation
    """Incarnation (id of the process) of the worker on the other side. A restarted worker is another peer."""
    index: int
    """Index of the room in the roster's table of fixed size. Votes are sent in the order of these indices."""
    pages_needed: PageCounts
    """Number of pages to reserve before the transfer starts, by KV group."""
    deadlines: Deadlines
    entered_ms: int
    ends_ms: int | None = None
    """Time at which the request times out, in milliseconds. None if the room's opener gave no time-out."""
    progress_ms: int = 0
    """Time of the last progress in the present phase, in milliseconds. It restarts the phase's deadline (see
    `progressed`)."""
    phase: Phase = Phase.BOOTSTRAPPING
    cause: Cause | None = None
    finished: bool = False
    proof: Proof | None = None
    stopping: bool = False
    """Whether all ranks agreed that a room in SUCCESS ends early. Like the phase, it changes in `settle`
    only."""
    busy: bool = False
    """Whether a running step reads or writes the room's pages. If so, they are given back only when the step
    has ended."""
    ended_for: Reason | None = None
    """Reason on which all ranks agreed when they ended the room (ABORT). It may differ from the cause that
    this rank saw."""
    phase_ms: dict[Phase, int] = field(default_factory=dict)
    """Milliseconds that the room spent in each phase that it has left, by phase."""
    compiled: bool = True
    """Whether the next token can be sampled without compiling a grammar first (`mask-is-fold`). True for a
    room without a grammar."""
    opener: Opener = NO_OPENER
    """Router that opened or adopted the room. Only its commands about the room count (`opener-owns`)."""
    term: int = 0
    """Number of times that the room was adopted by another router. Each adoption has a higher term than the
    one before (`adopt-first-wins`)."""
    orphan_until_ms: int | None = None
    """Time until which another router may adopt the room, in milliseconds. The room ends then
    (`orphan-ends`). None while its router reads it."""

    def obeys(self, opener: Opener) -> bool:
        """Return whether commands of a router count for this room. A room that came without an opener obeys
        every router."""
        return self.opener in (opener, NO_OPENER)

    def note(self, evidence: Evidence) -> None:
        """Add a piece of evidence to the room. The phase does not change. Raises PeerFault if it contradicts
        earlier evidence."""
        match evidence:
            case Failed(cause):
                if self.cause is None:
                    self.cause = cause
            case Finished():
                self.finished = True
            case Compiled():
                self.compiled = True
            case Fenced(proof):
                if self.proof is None:
                    self.proof = proof
            case _:
                self._note(evidence)

    def ending(self, now_ms: int) -> Cause | None:
        """Return the cause for which this rank wants to end the room early: one that it saw, a contradiction,
        or a passed deadline. None if there is none."""
        if self.cause is not None:
            return self.cause
        contradiction = self._contradiction()
        if contradiction is not None:
            return contradiction
        if self.orphan_until_ms is not None and now_ms >= self.orphan_until_ms:
            return Cause(Reason.ORPHANED, f"{self.SIDE.value}: no bootstrap adopted it in time")
        if now_ms < self._phase_deadline_ms:
            return None
        spent_ms = now_ms - self._since_ms
        late = "no progress for" if self._waits_until is None else "its request's time is over, after"
        text = f"{late} {spent_ms} ms while {self.phase.value}: {self._missing()}"
        return Cause(Reason.DEADLINE, f"{self.SIDE.value}: {text}")

    def vote(self, now_ms: int, *, has_capacity: bool) -> Vote:
        """Return this rank's vote on the room. `has_capacity`: whether the room's pages and slot could be
        reserved now."""
        match self.phase:
            case Phase.RETIRED:
                raise LocalBug(f"room {self.id}: still in the roster after its RELEASE")
            case Phase.FAILED:
                ready = self.proof is not None and not self.busy
            case Phase.SUCCESS:
                over = self.finished or self.stopping
                if not over and self.ending(now_ms) is not None:
                    return Vote.ABORT
                ready = over and self._unwritten() and not self.busy
            case _:
                if self.ending(now_ms) is not None:
                    return Vote.ABORT
                ready = self._ready() and (has_capacity or self.phase is not Phase.WAITING_FOR_INPUT)
        return Vote.ADVANCE if ready else Vote.STAY

    def settle(self, verdict: Vote, now_ms: int, reason: Reason | None = None) -> AnyEffect | None:
        """Make the room's move on which all ranks agreed. Return the effect that the caller has to carry out,
        or None.

        `reason`: agreed reason of an ABORT, for a rank that has seen no cause itself. Raises IllegalMove for
        a verdict that the table does not list, or that this rank's own vote rules out.
        """
        if verdict is Vote.STAY:
            return None
        if (self.phase, verdict) not in self.moves:
            raise IllegalMove(f"room {self.id}: {verdict.name} while {self.phase.value}")
        if verdict is Vote.ABORT:
            own = self.ending(now_ms)
            retracted = self.cause is None and own is not None and own.reason is Reason.RETRACTED
            # A retraction is no failure. If another rank saw a failure, that is why the room ends.
            yields = retracted and reason not in (None, Reason.RETRACTED)
            self.cause = self._agreed_cause(reason) if own is None or yields else own
            self.ended_for = self.ended_for or reason
        elif self.phase in GATED and not self._ready():
            raise IllegalMove(f"room {self.id}: all ranks are said to be ready, but {self._missing()}")
        before = self.phase
        self.phase, effect = self.moves[before, verdict]
        if self.phase is before:
            self.stopping = True
        else:
            self.phase_ms[before] = now_ms - self.entered_ms
            self.entered_ms = now_ms
        return effect

    @property
    def moves(self) -> Moves:
        """Table of the moves that the room can make: next phase and effect, by phase and verdict."""
        return self.MOVES

    @property
    def urgency(self) -> tuple[int, int, RoomId]:
        """Sort key of this room among the rooms that wait for capacity. The room with the least key is served
        first."""
        return 0, 0, self.id

    @property
    def margin(self) -> PageCounts:
        """Number of pages that must stay free when this room begins, by KV group, for its later growth."""
        return (0,) * len(self.pages_needed)

    @property
    def rows(self) -> int:
        """Most sequences of this room that a step computes: one for each choice."""
        return 1

    def progressed(self, now_ms: int) -> None:
        """Restart the deadline of the present phase, because there was progress on this room or on rooms
        before it in the queue."""
        self.progress_ms = now_ms

    @property
    def is_orphan(self) -> bool:
        """Whether the stream of the room's router broke, and no router has adopted the room yet."""
        return self.orphan_until_ms is not None

    @property
    def is_replayable(self) -> bool:
        """Whether another router can be sent all output of the room again."""
        return True

    @property
    def is_adoptable(self) -> bool:
        """Whether a router that adopts the room can still get all of its output here. All ranks have the same
        value, so it depends on nothing that one rank alone may have seen."""
        return self.phase is not Phase.FAILED and not self.stopping

    @property
    def deadline_ms(self) -> int:
        """Time at which this rank begins to vote for the end of the room, in milliseconds. In FAILED, the
        time by which a proof has to be made (see `baton.rooms.quarantine`)."""
        deadline_ms = self._phase_deadline_ms
        if self.orphan_until_ms is None or self.phase is Phase.FAILED:
            return deadline_ms
        return min(deadline_ms, self.orphan_until_ms)

    @property
    def _phase_deadline_ms(self) -> int:
        until_ms = self._waits_until
        return self._since_ms + self.deadlines.for_phase(self.phase) if until_ms is None else until_ms

    @property
    def _waits_until(self) -> int | None:
        """Time in milliseconds at which the request times out, if the room waits for capacity. None if the
        phase's own deadline counts."""
        return self.ends_ms if self.phase in self.WAITS else None

    @property
    def _since_ms(self) -> int:
        return max(self.entered_ms, self.progress_ms)

    def _agreed_cause(self, reason: Reason | None) -> Cause:
        if reason is None:
            raise IllegalMove(f"room {self.id}: ABORT while {self.phase.value}, and no rank said why")
        return Cause(reason, f"{self.SIDE.value}: seen by another rank of this worker")

    @abstractmethod
    def _note(self, evidence: Evidence) -> None:
        """Add evidence that only this side of a room accepts. Raises PeerFault for any other."""

    @abstractmethod
    def _ready(self) -> bool:
        """Return whether this rank has all evidence that the room needs for its next phase, apart from
        capacity. Called for phases before SUCCESS."""

    def _contradiction(self) -> Cause | None:
        """Return a cause to end the room if two pieces of its evidence contradict each other. Otherwise
        return None."""
        return None

    @abstractmethod
    def _unwritten(self) -> bool:
        """Return whether a room in SUCCESS has no transfer left that reads or writes its memory."""

    @abstractmethod
    def _missing(self) -> str:
        """Return what the room waits for in its present phase, as text for error messages."""
