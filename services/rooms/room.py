"""One room on one rank: what was seen, what is wished, where it stands.

The two sides differ in which evidence they accept and when they are ready; the moves, the deadlines,
the causes and the way out are the same, so they are here once.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from services.rooms.deadlines import Deadlines
from services.rooms.errors import Cause, IllegalMove, Reason
from services.rooms.evidence import Evidence, Failed, Fenced, Finished, Proof
from services.rooms.ids import Incarnation, RoomId
from services.rooms.phases import LIVE, Effect, Moves, Phase, Side, Vote


@dataclass(slots=True, eq=False)
class Room:
    """A sender or a receiver (see the subclasses). Made by `Roster.open` alone.

    Invariants:
      terminal-absorbs    the phase never leaves SUCCESS or FAILED but for RETIRED
      first-cause-wins    `cause` is set at most once
      apply-verdict       `phase` changes in `settle` alone, never in `note` or `vote`
    """

    SIDE: ClassVar[Side]
    MOVES: ClassVar[Moves]

    id: RoomId
    request_id: str
    peer: Incarnation
    """The worker on the other side, by incarnation: a restarted one is another peer."""
    place: int
    """Index in the roster's fixed table: what votes are keyed by."""
    pages_needed: int
    """Pages to reserve before the transfer starts."""
    deadlines: Deadlines
    entered_ms: int
    phase: Phase = Phase.BOOTSTRAPPING
    cause: Cause | None = None
    finished: bool = False
    proof: Proof | None = None
    busy: bool = False
    """A step that is running now reads or writes the room's pages: they stay until it has ended."""
    phase_ms: dict[Phase, int] = field(default_factory=dict)
    """Milliseconds spent in each phase that was left."""

    def note(self, evidence: Evidence) -> None:
        """Add a fact. Raises PeerFault where it contradicts what is known; changes no phase."""
        match evidence:
            case Failed(cause):
                if self.cause is None:
                    self.cause = cause
            case Finished():
                self.finished = True
            case Fenced(proof):
                if self.proof is None:
                    self.proof = proof
            case _:
                self._note(evidence)

    def vote(self, now_ms: int, *, has_capacity: bool) -> Vote:
        """This rank's wish. `has_capacity`: whether the room's pages and slot could be reserved now."""
        if self.phase in LIVE:
            if self.cause is not None or now_ms >= self.deadline_ms:
                return Vote.ABORT
            ready = has_capacity if self.phase is Phase.WAITING_FOR_INPUT else self._ready()
            return Vote.ADVANCE if ready else Vote.STAY
        if self.phase is Phase.SUCCESS:
            over = self.finished or self.cause is not None or now_ms >= self.deadline_ms
            return Vote.ADVANCE if over and self._unwritten() and not self.busy else Vote.STAY
        return Vote.ADVANCE if self.proof is not None and not self.busy else Vote.STAY

    def settle(self, verdict: Vote, now_ms: int) -> Effect | None:
        """Make the move every rank makes. Returns what it asks of the world, if anything."""
        if verdict is Vote.STAY:
            return None
        if (self.phase, verdict) not in self.MOVES:
            raise IllegalMove(f"room {self.id}: {verdict.name} while {self.phase.value}")
        if self.cause is None and self._late(verdict, now_ms):
            self.cause = Cause(Reason.DEADLINE, self._late_text(now_ms))
        self.phase_ms[self.phase] = now_ms - self.entered_ms
        self.phase, effect = self.MOVES[self.phase, verdict]
        self.entered_ms = now_ms
        return effect

    @property
    def deadline_ms(self) -> int:
        return self.entered_ms + self.deadlines.for_phase(self.phase)

    def _late(self, verdict: Vote, now_ms: int) -> bool:
        ended_by_time = verdict is Vote.ABORT or (self.phase is Phase.SUCCESS and not self.finished)
        return ended_by_time and now_ms >= self.deadline_ms

    def _late_text(self, now_ms: int) -> str:
        spent = now_ms - self.entered_ms
        return f"{self.SIDE.value}: no progress for {spent} ms while {self.phase.value}: {self._wanting()}"

    def _note(self, evidence: Evidence) -> None:
        raise NotImplementedError

    def _ready(self) -> bool:
        """BOOTSTRAPPING and TRANSFERRING: is everything there that the next phase needs?"""
        raise NotImplementedError

    def _unwritten(self) -> bool:
        """SUCCESS: is it certain that nothing is still being read or written on the room's behalf?"""
        raise NotImplementedError

    def _wanting(self) -> str:
        """What the current phase waits for, for people."""
        raise NotImplementedError
