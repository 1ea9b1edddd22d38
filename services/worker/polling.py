"""Time limits for the pause between two turns of a worker's loop, if no event ends the pause."""

from collections.abc import Iterable
from typing import Final

from baton.rooms.phases import Phase
from baton.rooms.room import Room

HEARTBEAT_S: Final = 1.0
POLL_S: Final = 0.001
DRAIN_S: Final = 0.01
"""Seconds between polls while the writes of a failed room have not ended. Some backends complete writes only
when polled."""


def deadline_s(rooms: Iterable[Room], now_ms: int) -> float:
    """Return the seconds until the earliest deadline of these rooms, at most HEARTBEAT_S."""
    least_ms = HEARTBEAT_S * 1000
    for room in rooms:
        wait_ms = room.deadline_ms - now_ms
        if wait_ms < least_ms and (wait_ms > 0 or room.phase is not Phase.FAILED):
            least_ms = max(wait_ms, 1)
    return least_ms / 1000
