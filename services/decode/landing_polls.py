"""Interval of looks for data that lands, which wakes no turn."""

from collections.abc import Iterable
from typing import Final

from baton.rooms.phases import Phase
from baton.rooms.quarantine import in_quarantine
from baton.rooms.receiver import Receiver
from baton.worker.polling import DRAIN_S, HEARTBEAT_S, POLL_S

BESIDE_STEP_S: Final = 0.004
"""Seconds between looks while a step computes.

Nothing is admitted before the step ends, and each look takes time from it. Over TCP, data still needs to be
driven.
"""


def poll_s(rooms: Iterable[Receiver], *, engine_free: bool) -> float:
    """Return the seconds until the next look.

    Writes to quarantined memory may end only while their target makes progress.
    """
    if any(room.phase is Phase.TRANSFERRING for room in rooms):
        return POLL_S if engine_free else BESIDE_STEP_S
    return DRAIN_S if any(in_quarantine(room) for room in rooms) else HEARTBEAT_S
