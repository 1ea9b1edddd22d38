"""The decode side of one room on one rank: may its request join the batch yet?

    BOOTSTRAPPING ---> WAITING_FOR_INPUT ---> TRANSFERRING ---> SUCCESS ---> RETIRED
       connecting         no pages yet           exposed         admitted       |
            |                  |                     |                          |
            +------------------+---------------------+--> FAILED ---------------+
                                                           proof: no write can land

The readiness gate is pages AND seal, and it is part of the vote (`gate-before-agree`).
"""

from dataclasses import dataclass
from operator import gt, sub
from typing import ClassVar

from services.ids import Generation, PageCounts
from services.rooms.errors import Cause, LocalBug, PeerFault, Reason, StaleGeneration
from services.rooms.evidence import Connected, Evidence, Landed, Proof, Sealed
from services.rooms.phases import RECEIVER_MOVES, Moves, Phase, Side
from services.rooms.plurals import counted
from services.rooms.room import NOT_COMPILED, Room


@dataclass(slots=True, eq=False)
class Receiver(Room):
    """See `Room`. `generation` is the tenancy of the slot it was granted, None before that."""

    SIDE: ClassVar[Side] = Side.DECODE
    MOVES: ClassVar[Moves] = RECEIVER_MOVES
    WAITS: ClassVar[frozenset[Phase]] = frozenset(
        {Phase.WAITING_FOR_INPUT, Phase.TRANSFERRING, Phase.SUCCESS}
    )
    """For pages, for the sender's queue, for a place in the batch."""

    pages_expected: PageCounts = ()
    """Pages of each group that the sender writes: the prompt's, from its grant on less those that are held
    already. May be 0."""
    connected: bool = False
    generation: Generation | None = None
    pages_landed: PageCounts = ()
    sealed: bool = False

    def expose(self, generation: Generation, held: PageCounts) -> None:
        """The room's memory is about to be named to the sender, as this generation. Once. `held`: leading
        pages of each group that hold what the sender would write."""
        if self.generation is not None or self.phase is not Phase.TRANSFERRING:
            raise LocalBug(f"room {self.id}: exposed twice, or while {self.phase.value}")
        if any(map(gt, held, self.pages_expected)):
            raise LocalBug(f"room {self.id}: {sum(held)} pages held of {sum(self.pages_expected)}")
        self.generation = generation
        self.pages_expected = tuple(map(sub, self.pages_expected, held))
        self.pages_landed = (0,) * len(held)

    def _note(self, evidence: Evidence) -> None:
        match evidence:
            case Connected():
                self.connected = True
            case Landed(generation, pages):
                self._mine(generation)
                if any(map(gt, pages, self.pages_expected)):
                    expected = sum(self.pages_expected)
                    raise PeerFault(f"room {self.id}: {sum(pages)} pages landed, {expected} expected")
                self.pages_landed = tuple(map(max, self.pages_landed, pages))
            case Sealed(generation):
                self._mine(generation)
                self.sealed = True
                if self.pages_landed == self.pages_expected:
                    self.proof = self.proof or Proof.DONE
            case _:
                raise PeerFault(f"room {self.id}: {type(evidence).__name__} is not for a receiver")

    def _mine(self, generation: Generation) -> None:
        if generation != self.generation:
            raise StaleGeneration(f"room {self.id}: generation {generation}, ours is {self.generation}")

    def _ready(self) -> bool:
        if self.phase is Phase.BOOTSTRAPPING:
            return self.connected
        return self.sealed and self.pages_landed == self.pages_expected and self.compiled

    def _contradiction(self) -> Cause | None:
        """A seal comes after every page, so one over too few pages is not worth waiting (`no-truncation`).

        Landed is noted before Sealed when both are read off one record. Who seals too early may write
        more, too: that seal is no proof.
        """
        if not self.sealed or self.pages_landed == self.pages_expected:
            return None
        text = f"decode: sealed after {self._landed()}"
        return Cause(Reason.TRANSFER_FAILED, text)

    def _landed(self) -> str:
        return f"{sum(self.pages_landed)} of {counted(sum(self.pages_expected), 'page')}"

    def _unwritten(self) -> bool:
        return self.sealed

    def _wanting(self) -> str:
        match self.phase:
            case Phase.BOOTSTRAPPING:
                return "not connected to the prefill worker"
            case Phase.WAITING_FOR_INPUT:
                return f"not free yet: {counted(sum(self.pages_needed), 'page')}"
            case Phase.TRANSFERRING:
                if self.sealed and not self.compiled:
                    return NOT_COMPILED
                seal = "sealed" if self.sealed else "not sealed"
                return f"{self._landed()} landed, {seal}"
            case _:
                return "the sequence did not end"
