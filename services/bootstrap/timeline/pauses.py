"""Pauses of a request: times in which no token came because a worker needed its pages (retraction)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.bootstrap.timeline.retry_chains import BETWEEN
from baton.bootstrap.timeline.timeline_schema import Line
from baton.fleet.room_entry import RoomEntry
from baton.rooms.errors import Reason
from baton.rooms.timeline import BOOTSTRAP, Moment

PAUSED: Final = "paused: the worker needed its pages"


@dataclass(frozen=True, slots=True)
class Pause:
    room: str
    """Id of the retracted room that began the pause."""
    ms: float
    """Length of the pause in milliseconds. It ends when each of the room's unfinished choices has its next
    token, or now."""


def pauses_of(rooms: Sequence[RoomEntry], lines: Sequence[Line], now_ms: float) -> list[Pause]:
    """Return the pauses of a request in order, from its `rooms` and their timeline `lines`.

    A room that was retracted before its first token belongs to the pause before. `now_ms`: time at which
    pauses that still last are cut off.
    """
    written: dict[tuple[str, str], float] = {}
    for line in lines:
        if line.lane == BOOTSTRAP:
            written.setdefault((line.room, line.name), line.at_ms)
    after: dict[str, list[str]] = {}
    for entry in rooms:
        if entry.retry_of is not None:
            after.setdefault(str(entry.retry_of), []).append(str(entry.id))
    within: set[str] = set()

    def end_ms(room: str, *words: Moment) -> float:
        """Return the time, in milliseconds, at which the choices of this room had their next token or
        ended."""
        within.add(room)
        if told := [written[room, word] for word in (*words, *BETWEEN) if (room, word) in written]:
            return min(told)
        if next_ones := after.get(room):
            return max(end_ms(each, Moment.FIRST_TOKEN_PASSED_ON) for each in next_ones)
        return written.get((room, Moment.FAILED), now_ms)

    pauses = []
    for entry in rooms:
        room = str(entry.id)
        began_ms = written.get((room, Moment.RETRACTED))
        retracted = entry.cause is not None and entry.cause.reason is Reason.RETRACTED
        if began_ms is not None and retracted and room not in within:
            pauses.append(Pause(room, max(end_ms(room) - began_ms, 0.0)))
    return pauses
