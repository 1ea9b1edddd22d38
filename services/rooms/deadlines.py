"""Deadlines of the phases of a room.

Every phase has a deadline (`deadline-everywhere`), which starts when the room enters the phase. In a phase
that waits for capacity (`Room.WAITS`), the request's own time-out takes the deadline's place if the opener
gave one. Waiting for capacity is not lack of progress (`waiting-has-no-deadline`). The loss of a peer is
detected by its lease or its stream. A deadline changes a vote. It never changes a phase, and frees no page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from baton.rooms.phases import Phase


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time allowed in each phase of a room, in milliseconds."""

    bootstrapping_ms: int
    waiting_ms: int
    transferring_ms: int
    success_ms: int
    """Time allowed in SUCCESS, in milliseconds. On prefill, until the room is retired. On decode, for all of
    decoding, if the request has no time-out of its own."""
    fence_ms: int
    """Time for a sender to prove that it writes no more to a failed room's memory, in milliseconds. After
    that, the memory is revoked (`baton.rooms.quarantine`)."""
    orphan_ms: int = 0
    """Time for another router to adopt a room whose router's stream broke, in milliseconds. With 0, such a
    room ends at once."""

    def for_phase(self, phase: Phase) -> int:
        return _FIELDS[phase](self)


_FIELDS: Final[Mapping[Phase, Callable[[Deadlines], int]]] = {
    Phase.BOOTSTRAPPING: attrgetter("bootstrapping_ms"),
    Phase.WAITING_FOR_INPUT: attrgetter("waiting_ms"),
    **dict.fromkeys((Phase.TRANSFERRING, Phase.COMPUTING, Phase.SEALING), attrgetter("transferring_ms")),
    Phase.SUCCESS: attrgetter("success_ms"),
    **dict.fromkeys((Phase.FAILED, Phase.RETIRED), attrgetter("fence_ms")),
}
"""Functions that read the deadline of a phase from a `Deadlines`, by phase. A table is faster than a match,
and each room is looked up in each turn."""
