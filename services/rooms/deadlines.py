"""How long may a room stay in a phase?

Every phase has one (`deadline-everywhere`), which starts when the phase is entered. A phase that waits for
capacity (`Room.WAITS`) lasts as long as its request may, where the room's opener told how long that is:
waiting is not lack of progress (`waiting-has-no-deadline`). Its own bound here is for rooms whose opener did
not. That a peer is gone is told by its lease or its stream. A deadline changes a vote, never a phase, and
never frees a page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from baton.rooms.phases import Phase


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Milliseconds allowed per phase."""

    bootstrapping_ms: int
    waiting_ms: int
    transferring_ms: int
    success_ms: int
    """Sender: until retired. Receiver: for the whole of decoding, where its request's time is not known."""
    fence_ms: int
    """How long a proof is sought by asking before the memory is taken back (`quarantine.py`)."""

    def for_phase(self, phase: Phase) -> int:
        return _FIELDS[phase](self)


_FIELDS: Final[Mapping[Phase, Callable[[Deadlines], int]]] = {
    Phase.BOOTSTRAPPING: attrgetter("bootstrapping_ms"),
    Phase.WAITING_FOR_INPUT: attrgetter("waiting_ms"),
    **dict.fromkeys((Phase.TRANSFERRING, Phase.COMPUTING, Phase.SEALING), attrgetter("transferring_ms")),
    Phase.SUCCESS: attrgetter("success_ms"),
    **dict.fromkeys((Phase.FAILED, Phase.RETIRED), attrgetter("fence_ms")),
}
"""Asked for each room in each turn: a look, and not one comparison for each phase."""
