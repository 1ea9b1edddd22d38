"""Alignment of the lines of a timeline, which several hosts write, on one clock.

Each line has the time of day of its process and the monotonic clock of its host. Lines from the router's own
host are placed by the monotonic clock, to the microsecond. Lines from another host are placed by the time of
day. They are shifted so that no event of a room comes before the router opened it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from baton.rooms.timeline import BOOTSTRAP, Event

SAME_HOST_MS: Final = 20.0
"""Largest difference between two sources' clocks at which they are taken to be on one host, in milliseconds.
A mistake of that size is no worse than the error of times of day."""


class AlignedClock:
    """Clock on which the events of one request's rooms are placed, in milliseconds since the first of
    them."""

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
        """Return the time of an event in milliseconds, as a time of day of the router's host."""
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
    """Return the time of day at which the host's monotonic clock was zero, in milliseconds, by source of
    events. None for a source without that clock."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in events:
        found[each.source] += [each.wall_ms - each.host_us / 1000] if each.host_us else []
    return {source: median(values) if values else None for source, values in found.items()}
