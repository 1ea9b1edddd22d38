"""Decode side of a room on one rank, and its gate to the batch.

    BOOTSTRAPPING ---> WAITING_FOR_INPUT ---> TRANSFERRING ---> SUCCESS ---> RETIRED
       connecting         no pages yet           exposed         admitted       |
            |                  |                     |                          |
            |                  +-----> COMPUTING ----|---> SUCCESS ...          |
            |                  |      a local room   |                          |
            +------------------+---------------------+--> FAILED ---------------+
                                                           proof: no write can land

A room joins the batch when all its pages AND the seal have arrived. This gate is part of the vote
(`gate-before-agree`). A local room is one whose prompt this worker computes itself. It waits for no other
worker and exposes no memory. It joins when the whole prompt is computed and its first token sampled, on every
rank.
"""

from dataclasses import dataclass
from operator import gt, sub
from typing import ClassVar, Final

from baton.ids import Generation, PageCounts
from baton.rooms.errors import Cause, LocalBug, PeerFault, Reason, StaleGeneration
from baton.rooms.evidence import Computed, Connected, Evidence, Landed, Proof, Sealed
from baton.rooms.phases import LOCAL_MOVES, RECEIVER_MOVES, Moves, Phase, Side
from baton.rooms.plurals import counted
from baton.rooms.room import NOT_COMPILED, Room

UNDECIDED: Final = frozenset({Phase.BOOTSTRAPPING, Phase.WAITING_FOR_INPUT})
"""Phases of a room on decode before its pages are reserved. Until then the decode worker may choose to
compute the prompt itself."""


@dataclass(slots=True, eq=False)
class Receiver(Room):
    """Decode side of a room on one rank. `generation`: number of the use of the metadata slot that was
    granted. None before the grant."""

    SIDE: ClassVar[Side] = Side.DECODE
    MOVES: ClassVar[Moves] = RECEIVER_MOVES
    WAITS: ClassVar[frozenset[Phase]] = frozenset(
        {Phase.WAITING_FOR_INPUT, Phase.TRANSFERRING, Phase.SUCCESS}
    )
    """Phases in which a room on decode waits for capacity: for pages, for its turn at prefill, or for space
    in the batch."""

    pages_expected: PageCounts = ()
    """Number of pages that prefill has to write, by KV group. Before the grant, all pages of the prompt;
    after it, those that are not cached on decode. May be 0."""
    connected: bool = False
    generation: Generation | None = None
    pages_landed: PageCounts = ()
    sealed: bool = False
    local: bool = False
    """Whether this decode worker computes the room's prompt itself. All ranks agreed on that before pages
    were granted (`mine-or-granted`)."""
    is_computed: bool = False
    """Whether the prompt of a local room is computed, and the first token sampled."""

    @property
    def moves(self) -> Moves:
        return LOCAL_MOVES if self.local else RECEIVER_MOVES

    def claim_local(self) -> bool:
        """Make the room local, so that decode computes its prompt. Return False if it has pages already, is
        over, or was local before."""
        if self.local or self.phase not in UNDECIDED:
            return False
        self.local = True
        return True

    def expose(self, generation: Generation, cached: PageCounts) -> None:
        """Record that the addresses of the room's memory will now be sent to prefill. Called once.

        `generation`: number of this use of the metadata slot. `cached`: number of leading pages whose content
        is already on this worker, by KV group.
        """
        if self.generation is not None or self.phase is not Phase.TRANSFERRING or self.local:
            raise LocalBug(f"room {self.id}: exposed twice, or while {self.phase.value}")
        if any(map(gt, cached, self.pages_expected)):
            raise LocalBug(f"room {self.id}: {sum(cached)} pages held of {sum(self.pages_expected)}")
        self.generation = generation
        self.pages_expected = tuple(map(sub, self.pages_expected, cached))
        self.pages_landed = (0,) * len(cached)

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
            case Computed():
                if not self.local:
                    raise LocalBug(f"room {self.id}: computed here, though it is its sender's to compute")
                self.is_computed = True
            case _:
                raise PeerFault(f"room {self.id}: {type(evidence).__name__} is not for a receiver")

    def _mine(self, generation: Generation) -> None:
        if generation != self.generation:
            raise StaleGeneration(f"room {self.id}: generation {generation}, ours is {self.generation}")

    def _ready(self) -> bool:
        match self.phase:
            case Phase.BOOTSTRAPPING:
                return self.connected or self.local
            case Phase.WAITING_FOR_INPUT:
                return self.compiled or not self.local
            case Phase.COMPUTING:
                return self.is_computed
            case _:
                return self.sealed and self.pages_landed == self.pages_expected and self.compiled

    def _contradiction(self) -> Cause | None:
        """Return a cause if the seal arrived before all pages. Prefill writes the seal last, so the missing
        pages will not come (`no-truncation`).

        If both are read from one record, `Landed` is noted before `Sealed`. A sender that seals too early may
        write more, so such a seal is no proof.
        """
        if not self.sealed or self.pages_landed == self.pages_expected:
            return None
        text = f"decode: sealed after {self._landed()}"
        return Cause(Reason.TRANSFER_FAILED, text)

    def _landed(self) -> str:
        return f"{sum(self.pages_landed)} of {counted(sum(self.pages_expected), 'page')}"

    def _unwritten(self) -> bool:
        return self.sealed or self.local

    def _missing(self) -> str:
        match self.phase:
            case Phase.BOOTSTRAPPING:
                return "not connected to the prefill worker"
            case Phase.WAITING_FOR_INPUT:
                if self.local and not self.compiled:
                    return NOT_COMPILED
                return f"not free yet: {counted(sum(self.pages_needed), 'page')}"
            case Phase.COMPUTING:
                return "the prompt is not computed"
            case Phase.TRANSFERRING:
                if self.sealed and not self.compiled:
                    return NOT_COMPILED
                seal = "sealed" if self.sealed else "not sealed"
                return f"{self._landed()} landed, {seal}"
            case _:
                return "the sequence did not end"
