"""How long may the turns rest, when nothing wakes them?"""

from collections.abc import Iterable
from typing import Final

from services.rooms.phases import Phase
from services.rooms.room import Room

HEARTBEAT_S: Final = 1.0
POLL_S: Final = 0.001
DRAIN_S: Final = 0.01
"""While a room that failed waits for its writes to end: what was posted may end only while somebody looks."""


def deadline_s(rooms: Iterable[Room], now_ms: int) -> float:
    """How soon time alone may ask for a turn."""
    waits = [(room.deadline_ms - now_ms, room.phase) for room in rooms]
    asking = (wait for wait, phase in waits if wait > 0 or phase is not Phase.FAILED)
    return min([HEARTBEAT_S, *(max(wait, 1) / 1000 for wait in asking)])
