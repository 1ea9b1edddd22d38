"""How soon may something have landed, that wakes nobody?"""

from collections.abc import Iterable
from typing import Final

from baton.rooms.phases import Phase
from baton.rooms.quarantine import in_quarantine
from baton.rooms.receiver import Receiver
from baton.worker.polling import DRAIN_S, HEARTBEAT_S, POLL_S

BESIDE_STEP_S: Final = 0.004
"""How soon to look for what may land while a step computes: nothing is admitted before it ends, each look
takes time from it, and over TCP what is on its way needs to be driven all the same."""


def poll_s(rooms: Iterable[Receiver], *, engine_free: bool) -> float:
    """How soon to look. What a sender posted to memory in quarantine may end only while its target makes
    progress."""
    if any(room.phase is Phase.TRANSFERRING for room in rooms):
        return POLL_S if engine_free else BESIDE_STEP_S
    return DRAIN_S if any(in_quarantine(room) for room in rooms) else HEARTBEAT_S
