"""How does a deadline pass where time stands still?"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from services.ids import RoomId
from services.rooms.deadlines import Deadlines
from services.rooms.roster import Roster

FAR: Final = Deadlines(*[1 << 40] * 5)
_PASSED: Final = Deadlines(*[0] * 5)


@contextmanager
def expired(roster: Roster[Any], room: RoomId | None) -> Iterator[None]:
    """For the length of one turn, and on one rank, `room` is past its deadline."""
    late = [each for each in roster if each.id == room]
    for each in late:
        each.deadlines = _PASSED
    yield
    for each in late:
        each.deadlines = FAR
