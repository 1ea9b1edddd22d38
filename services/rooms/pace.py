"""How long will what waits have to wait, judged by how fast things went lately?

Only time in which something waited counts: a system with nothing to do is not slow. Without such time, or
with too little done in it, nothing is said, and whoever asks decides without.
"""

from collections import deque
from typing import Final

WINDOW_MS: Final = 60_000
"""Of time in which something waited, counted together: what was before that says nothing any more."""
BUSY_MS_MIN: Final = 2_000
DONE_MIN: Final = 4
"""Less than this is no measurement."""
SPAN_MS: Final = 250
"""What is done within so long is kept as one."""


class Pace:
    """Of one queue. Bounded: WINDOW_MS / SPAN_MS spans. Time is an argument, and does not go back."""

    def __init__(self) -> None:
        self._spans: deque[list[int]] = deque()
        """[milliseconds busy, units done, times something was done] each; the last one is added to."""
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
        busy_ms, units_done, times = (sum(span[each] for span in self._spans) for each in range(3))
        if busy_ms < BUSY_MS_MIN or times < DONE_MIN or units_done <= 0:
            return None
        return units * busy_ms // units_done

    def _add(self, busy_ms: int, units: int, times: int) -> None:
        spans = self._spans
        if not spans or spans[-1][0] >= SPAN_MS:
            spans.append([0, 0, 0])
        last = spans[-1]
        last[0] += busy_ms
        last[1] += units
        last[2] += times
        while len(spans) > 1 and sum(span[0] for span in spans) - spans[0][0] >= WINDOW_MS:
            spans.popleft()
