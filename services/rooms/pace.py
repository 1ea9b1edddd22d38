"""How long will what waits have to wait, judged by how fast things went lately?

Only time in which something waited counts: a system with nothing to do is not slow. Without such time, or
with too little done in it, nothing is said, and whoever asks decides without.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from services.rooms.waiting_line import Ahead

WINDOW_MS: Final = 60_000
"""Of time in which something waited, counted together: what was before that says nothing any more."""
BUSY_MS_MIN: Final = 2_000
DONE_MIN: Final = 4
"""Less than this is no measurement."""
SPAN_MS: Final = 250
"""What is done within so long is kept as one."""
CLASSES_MAX: Final = 32
"""Of those that waited last the pace is known."""
SPREAD_MS: Final = 60_000
"""Those who are turned away are told to come back one by one, over so long at most: some never come."""


class Pace:
    """Of one queue. Bounded: WINDOW_MS / SPAN_MS spans. Time is an argument, and does not go back."""

    def __init__(self) -> None:
        self._spans: deque[list[int]] = deque()
        """[milliseconds busy, units done, times something was done] each; the last one is added to."""
        self._sums = [0, 0, 0]
        """Of all spans."""
        self._busy_since_ms: int | None = None

    def look(self, now_ms: int, *, waits: bool) -> None:
        """Whether anything waits from now on. To be called whenever that changes, and now and then."""
        if self._busy_since_ms is not None:
            self._add(now_ms - self._busy_since_ms, 0, 0)
        self._busy_since_ms = now_ms if waits else None

    def done(self, units: int = 1) -> None:
        """So much was served, or given back. It counts while something waits."""
        if self._busy_since_ms is not None:
            self._add(0, units, 1)

    def wait_ms(self, units: int) -> int | None:
        """How long it takes until so much was done; None without a measurement."""
        busy_ms, units_done, times = self._sums
        if busy_ms < BUSY_MS_MIN or times < DONE_MIN or units_done <= 0:
            return None
        return units * busy_ms // units_done

    def _add(self, busy_ms: int, units: int, times: int) -> None:
        spans = self._spans
        if not spans or spans[-1][0] >= SPAN_MS:
            spans.append([0, 0, 0])
        for each, more in enumerate((busy_ms, units, times)):
            spans[-1][each] += more
            self._sums[each] += more
        while len(spans) > 1 and self._sums[0] - spans[0][0] >= WINDOW_MS:
            for each, less in enumerate(spans.popleft()):
                self._sums[each] -= less


@dataclass(slots=True)
class _OfClass:
    pace: Pace = field(default_factory=Pace)
    told_ms: int = 0
    """When the last of it that was turned away is to come back."""


class LinePace:
    """Of a line of several classes. A class is no faster than all of it, and no faster than it was itself:
    those above it go on coming. Bounded: CLASSES_MAX."""

    def __init__(self) -> None:
        self._all = Pace()
        self._classes: OrderedDict[int, _OfClass] = OrderedDict()

    def look(self, now_ms: int, waiting: int, in_class: Callable[[int], int]) -> None:
        """How many wait from now on, in all and of each class. To be called whenever that changes, and now
        and then."""
        self._all.look(now_ms, waits=waiting > 0)
        for priority, known in self._classes.items():
            known.pace.look(now_ms, waits=in_class(priority) > 0)

    def waits(self, priority: int) -> None:
        """Somebody of this class waits from now on."""
        self._of(priority)

    def done(self, priority: int | None) -> None:
        """One of this class was served. None: one that had a room before, which is of none."""
        self._all.done()
        known = None if priority is None else self._classes.get(priority)
        if known is not None:
            known.pace.done()

    def wait_ms(self, ahead: Ahead, priority: int) -> int | None:
        """Of a request with so many ahead of it; None without a measurement."""
        known = self._classes.get(priority)
        own_ms = None if known is None else known.pace.wait_ms(ahead.in_class + 1)
        all_ms = self._all.wait_ms(ahead.all + 1)
        return max((each for each in (own_ms, all_ms) if each is not None), default=None)

    def come_back_ms(self, now_ms: int, ahead: Ahead, priority: int, may_wait_ms: int) -> int | None:
        """How long a request that is turned away is to stay away: until it would wait no longer than it may,
        and until those have had a place that were turned away before it. None without a measurement."""
        one_ms, wait_ms = self.wait_ms(Ahead(0, 0), priority), self.wait_ms(ahead, priority)
        if one_ms is None or wait_ms is None:
            return None
        known = self._of(priority)
        soonest_ms = now_ms + max(wait_ms - may_wait_ms, one_ms)
        known.told_ms = min(max(soonest_ms, known.told_ms + one_ms), soonest_ms + SPREAD_MS)
        return known.told_ms - now_ms

    def _of(self, priority: int) -> _OfClass:
        known = self._classes.setdefault(priority, _OfClass())
        self._classes.move_to_end(priority)
        if len(self._classes) > CLASSES_MAX:
            self._classes.popitem(last=False)
        return known
