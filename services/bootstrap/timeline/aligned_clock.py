"""When did each line of a timeline happen, on one clock?

A line carries its process's time of day and its host's monotonic clock. The lines of the bootstrap's own
host are placed by the latter, to the microsecond. Those of another host are placed by the time of day, moved
as far as causes ask for: nothing of a room happens before the bootstrap opened it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from baton.rooms.timeline import BOOTSTRAP, Event

SAME_HOST_MS: Final = 20.0
"""Two processes whose clocks differ by less are taken to share a host: what that gets wrong is no more than
what times of day get wrong."""


class AlignedClock:
    """Places the events of one request's rooms, as milliseconds since the first of them."""

    def __init__(self, rooms: Iterable[Sequence[Event]]) -> None:
        rooms = list(rooms)
        offsets = _offsets_ms(each for events in rooms for each in events)
        own = offsets.get(BOOTSTRAP)
        self._own = own
        self.shared: Mapping[str, bool] = {
            source: own is not None and offset is not None and abs(offset - own) <= SAME_HOST_MS
            for source, offset in offsets.items()
        }
        self._moved: dict[str, float] = dict.fromkeys(offsets, 0.0)
        for events in rooms:
            self._move(events)
        placed = [self._placed(each) for events in rooms for each in events]
        self._begin = min(placed, default=0.0)

    @property
    def begun_wall_ms(self) -> int:
        return round(self._begin)

    def at_ms(self, event: Event) -> float:
        return round(self._placed(event) - self._begin, 3)

    def _placed(self, event: Event) -> float:
        """By the bootstrap's time of day."""
        if self._own is not None and self.shared.get(event.source):
            return event.host_us / 1000 + self._own
        return event.wall_ms + self._moved.get(event.source, 0.0)

    def _move(self, events: Sequence[Event]) -> None:
        opened = [self._placed(each) for each in events if each.source == BOOTSTRAP]
        for source in {each.source for each in events} - {BOOTSTRAP}:
            if opened and not self.shared[source]:
                first = min(self._placed(each) for each in events if each.source == source)
                self._moved[source] += max(min(opened) - first, 0.0)


def _offsets_ms(events: Iterable[Event]) -> dict[str, float | None]:
    """By source: the time of day when its host's monotonic clock was zero. None where it does not tell."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in events:
        found[each.source] += [each.wall_ms - each.host_us / 1000] if each.host_us else []
    return {source: median(values) if values else None for source, values in found.items()}
