"""Polling intervals for data that prefill workers write into this rank's memory. Such writes wake no turn."""

from collections.abc import Iterable
from typing import Final

from baton.rooms.phases import Phase
from baton.rooms.quarantine import in_quarantine
from baton.rooms.receiver import Receiver
from baton.worker.polling import DRAIN_S, HEARTBEAT_S, POLL_S

BESIDE_STEP_S: Final = 0.004
"""Seconds between two polls for landed data while an engine step computes.

No room is admitted before the step ends, and each poll takes time from the step. Over TCP, transfers still
need polls to make progress.
"""


def poll_s(rooms: Iterable[Receiver], *, engine_free: bool) -> float:
    """Return the seconds until the next poll for landed data. `engine_free`: whether no step computes.

    While memory is in quarantine, polls continue, because writes to it may end only if this rank makes
    progress.
    """
    if any(room.phase is Phase.TRANSFERRING for room in rooms):
        return POLL_S if engine_free else BESIDE_STEP_S
    return DRAIN_S if any(in_quarantine(room) for room in rooms) else HEARTBEAT_S
