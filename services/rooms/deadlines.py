"""Deadlines of the phases of a room.

Every phase has one (`deadline-everywhere`), which starts when the phase is entered. A phase that waits for
capacity (`Room.WAITS`) lasts as long as its request may, if the room's opener gave that time: waiting is not
lack of progress (`waiting-has-no-deadline`). Its own deadline is for rooms without that time. The loss of a
peer shows by its lease or its stream. A deadline changes a vote, never a phase, and frees no page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from baton.rooms.phases import Phase


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time allowed in each phase, in milliseconds."""

    bootstrapping_ms: int
    waiting_ms: int
    transferring_ms: int
    success_ms: int
    """For a sender: until it is retired. For a receiver: all of decoding, if its request's time is
    unknown."""
    fence_ms: int
    """Time in which a proof is sought by asking, before the memory is revoked (`baton.rooms.quarantine`)."""

    def for_phase(self, phase: Phase) -> int:
        return _FIELDS[phase](self)


_FIELDS: Final[Mapping[Phase, Callable[[Deadlines], int]]] = {
    Phase.BOOTSTRAPPING: attrgetter("bootstrapping_ms"),
    Phase.WAITING_FOR_INPUT: attrgetter("waiting_ms"),
    **dict.fromkeys((Phase.TRANSFERRING, Phase.COMPUTING, Phase.SEALING), attrgetter("transferring_ms")),
    Phase.SUCCESS: attrgetter("success_ms"),
    **dict.fromkeys((Phase.FAILED, Phase.RETIRED), attrgetter("fence_ms")),
}
"""Deadline by phase. It is read for each room in each turn, so it is a table and not a match."""
