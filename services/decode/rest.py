"""How long may the turns rest, when nothing wakes them?"""

from collections.abc import Iterable
from typing import Final

from services.rooms.phases import Phase
from services.rooms.quarantine import in_quarantine
from services.rooms.receiver import Receiver

HEARTBEAT_S: Final = 1.0
POLL_S: Final = 0.001
BESIDE_STEP_S: Final = 0.004
"""How soon to look for what may land while a step computes: nothing is admitted before it ends, each look
takes time from it, and over TCP what is on its way needs to be driven all the same."""
DRAIN_S: Final = 0.01
"""While memory is in quarantine: what its sender posted may end only while its target makes progress."""


def look_s(rooms: Iterable[Receiver], *, engine_free: bool) -> float:
    """How soon to look for what wakes nobody."""
    if any(room.phase is Phase.TRANSFERRING for room in rooms):
        return POLL_S if engine_free else BESIDE_STEP_S
    return DRAIN_S if any(in_quarantine(room) for room in rooms) else HEARTBEAT_S


def deadline_s(rooms: Iterable[Receiver], now_ms: int) -> float:
    """How soon time alone may ask for a turn."""
    waits = [(room.deadline_ms - now_ms, room.phase) for room in rooms]
    asking = (wait for wait, phase in waits if wait > 0 or phase is not Phase.FAILED)
    return min([HEARTBEAT_S, *(max(wait, 1) / 1000 for wait in asking)])
