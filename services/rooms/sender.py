"""Prefill side of a room on one rank.

    BOOTSTRAPPING ---> WAITING_FOR_INPUT ---> TRANSFERRING ---> SEALING ---> SUCCESS ---> RETIRED
       no destination     no pages yet           pushing         written      sealed        |
            |                  |                     |              |                       |
            +------------------+---------------------+--------------+--> FAILED ------------+
                                                                          its writes end

The record is posted with the last pages. The seal is posted when every rank has written all pages and the
record (`seal-last`). The elected rank alone posts both (`one-writer`). A sender posts writes only while
TRANSFERRING or SEALING, and without a cause. After that, it may answer a close of the room as soon as its
posted writes have ended. The diagram in docs/design/hand-over.md is drawn from the table.
"""

from dataclasses import dataclass
from typing import ClassVar

from baton.rooms.errors import LocalBug, PeerFault
from baton.rooms.evidence import Evidence, Granted, Sealed, Written
from baton.rooms.phases import SENDER_MOVES, Moves, Phase, Side
from baton.rooms.room import NOT_COMPILED, Room


@dataclass(slots=True, eq=False)
class Sender(Room):
    """Prefill side of a room on one rank. `grant`: destination pages on decode, None before decode sent them.
    `elected`: whether this rank writes the room's record and seal."""

    SIDE: ClassVar[Side] = Side.PREFILL
    MOVES: ClassVar[Moves] = SENDER_MOVES
    WAITS: ClassVar[frozenset[Phase]] = frozenset({Phase.BOOTSTRAPPING, Phase.WAITING_FOR_INPUT})
    """Phases in which a room on prefill waits for capacity: for decode's pages, or for pages of its own."""

    elected: bool = True
    grant: Granted | None = None
    written: bool = False
    sealed: bool = False

    def _note(self, evidence: Evidence) -> None:
        match evidence:
            case Granted():
                if self.grant is not None and self.grant != evidence:
                    raise PeerFault(f"room {self.id}: a second, different destination")
                self.grant = evidence
            case Written():
                self.written = True
            case Sealed(generation):
                if self.grant is None or generation != self.grant.generation:
                    raise LocalBug(f"room {self.id}: sealed generation {generation} without its grant")
                if self.phase is not Phase.SEALING or not self.elected:
                    raise LocalBug(f"room {self.id}: sealed while {self.phase.value}, or not by its writer")
                self.sealed = True
            case _:
                raise PeerFault(f"room {self.id}: {type(evidence).__name__} is not for a sender")

    def _ready(self) -> bool:
        match self.phase:
            case Phase.BOOTSTRAPPING:
                return self.grant is not None and self.compiled
            case Phase.WAITING_FOR_INPUT:
                return True
            case Phase.TRANSFERRING:
                return self.written
            case _:
                return self._unwritten()

    def _unwritten(self) -> bool:
        return self.sealed or not self.elected

    def _missing(self) -> str:
        match self.phase:
            case Phase.BOOTSTRAPPING:
                return NOT_COMPILED if self.grant else "the decode worker has sent no destination"
            case Phase.WAITING_FOR_INPUT:
                return "no pages are free to compute into"
            case Phase.TRANSFERRING:
                return "the pages were not all written"
            case _:
                return "the seal was not written"
