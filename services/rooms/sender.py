"""The prefill side of one room on one rank: may it compute, and has everything arrived?

    BOOTSTRAPPING ---> WAITING_FOR_INPUT ---> TRANSFERRING ---> SUCCESS ---> RETIRED
       no destination     no pages yet           pushing          sealed        |
            |                  |                     |                          |
            +------------------+---------------------+--> FAILED ---------------+
                                                           its writes end

A sender posts only while TRANSFERRING and without a cause: after that `close` may be answered as soon as
what was posted has ended. The diagram in docs/ARCHITECTURE.md is drawn from the table.
"""

from dataclasses import dataclass
from typing import ClassVar

from services.rooms.errors import LocalBug, PeerFault
from services.rooms.evidence import Evidence, Granted, Sealed
from services.rooms.phases import SENDER_MOVES, Moves, Phase, Side
from services.rooms.room import Room


@dataclass(slots=True, eq=False)
class Sender(Room):
    """See `Room`. `grant` is where to write; there is none before the receiver reserved it."""

    SIDE: ClassVar[Side] = Side.PREFILL
    MOVES: ClassVar[Moves] = SENDER_MOVES

    grant: Granted | None = None
    sealed: bool = False

    def _note(self, evidence: Evidence) -> None:
        match evidence:
            case Granted():
                if self.grant is not None and self.grant != evidence:
                    raise PeerFault(f"room {self.id}: a second, different destination")
                self.grant = evidence
            case Sealed(generation):
                if self.grant is None or generation != self.grant.generation:
                    raise LocalBug(f"room {self.id}: sealed generation {generation} without its grant")
                self.sealed = True
            case _:
                raise PeerFault(f"room {self.id}: {type(evidence).__name__} is not for a sender")

    def _ready(self) -> bool:
        return self.grant is not None if self.phase is Phase.BOOTSTRAPPING else self.sealed

    def _unwritten(self) -> bool:
        return self.sealed

    def _wanting(self) -> str:
        match self.phase:
            case Phase.BOOTSTRAPPING:
                return "the decode worker has sent no destination"
            case Phase.WAITING_FOR_INPUT:
                return "no pages are free to compute into"
            case _:
                return "the pages were not all written"
