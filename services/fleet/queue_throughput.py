"""Throughput of the queue for workers, in tokens, and the expected waits that follow from it.

The throughput is the work done on all rooms while requests waited, per time in which they waited. Requests
differ by orders of magnitude, so work is counted in tokens, as it is done. So a stack with long answers has a
throughput before the first of them ends. Time without waiting requests does not count, since an idle stack is
not slow. A short time or little work gives no estimate.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.fleet.fair_queue import NOTHING_QUEUED, QueuedWork

WINDOW_MS: Final = 60_000
"""Length of the measurement window, in milliseconds with waiting requests. Older measurements are dropped."""
BUSY_MS_MIN: Final = 2_000
DONE_MIN: Final = 4
"""Fewest reports of work from which a throughput is computed, and fewest served requests from which a class's
share is."""
SPAN_MS: Final = 250
"""Length of one span of the measurement window, in milliseconds."""
CLASSES_MAX: Final = 32
"""Most priority classes whose share of the throughput is remembered: those that waited last."""
SHARE_TIMES_MAX: Final = 128
"""Number of served requests from which a class's share is computed. Older requests weigh less."""
SHARE_MIN: Final = 1 / 64
SPREAD_MS: Final = 60_000
"""Longest time over which the returns of rejected clients are spread, in milliseconds. Some clients never
return."""


class BusyThroughput:
    """Work done per time in which requests waited. Bounded: WINDOW_MS / SPAN_MS spans. Time is an argument,
    and does not go back."""

    def __init__(self) -> None:
        self.spans: deque[list[int]] = deque()
        """Spans of the measurement, each as [milliseconds with waiting requests, units of work done, number
        of reports]. New measurements are added to the last span."""
        self._sums = [0, 0, 0]
        """Sums over all spans of the three numbers that each span has."""
        self.units_min = 1
        """Least number of units of work (tokens) from which a throughput is computed."""
        self._busy_since_ms: int | None = None

    def look(self, now_ms: int, *, waits: bool) -> None:
        """Record whether any request waits now. To be called whenever that changes, and regularly."""
        if self._busy_since_ms is not None:
            self._add(now_ms - self._busy_since_ms, 0, 0)
        self._busy_since_ms = now_ms if waits else None

    def done(self, units: int = 1) -> None:
        """Count units of work that were done. They count only while a request waits."""
        if self._busy_since_ms is not None:
            self._add(0, units, 1)

    def wait_ms(self, units: int) -> int | None:
        """Return how long `units` units of work take, in milliseconds. None if no throughput was measured."""
        busy_ms, units_done, times = self._sums
        if busy_ms < BUSY_MS_MIN or times < DONE_MIN or units_done < max(self.units_min, 1):
            return None
        return units * busy_ms // units_done

    def _add(self, busy_ms: int, units: int, times: int) -> None:
        spans = self.spans
        if not spans or spans[-1][0] >= SPAN_MS:
            spans.append([0, 0, 0])
        for each, more in enumerate((busy_ms, units, times)):
            spans[-1][each] += more
            self._sums[each] += more
        while len(spans) > 1 and self._sums[0] - spans[0][0] >= WINDOW_MS:
            for each, less in enumerate(spans.popleft()):
                self._sums[each] -= less


@dataclass(slots=True)
class _ClassShare:
    """Share of a priority class in the work of requests that got rooms while requests of the class waited."""

    waits: bool = False
    tokens: int = 0
    of_tokens: int = 0
    times: int = 0
    return_ms: int = 0
    """Time in milliseconds at which the last client that was rejected in this class is to try again."""

    def served(self, tokens: int, *, is_own: bool) -> None:
        if not self.waits:
            return
        self.times += 1
        self.of_tokens += tokens
        self.tokens += tokens * is_own
        if self.times > SHARE_TIMES_MAX:
            self.tokens, self.of_tokens, self.times = self.tokens // 2, self.of_tokens // 2, self.times // 2

    def share(self) -> float:
        """Return the part of the queue's throughput that this class gets, from 0 to 1. It is 1 while it is
        unknown."""
        return max(self.tokens / self.of_tokens, SHARE_MIN) if self.times >= DONE_MIN else 1.0


class QueueThroughput:
    """Throughput of a queue with priority classes. A class gets only its share of the throughput, since
    requests of higher classes keep coming. Bounded: CLASSES_MAX."""

    def __init__(self) -> None:
        self._all = BusyThroughput()
        self.classes: OrderedDict[int, _ClassShare] = OrderedDict()

    def look(self, now_ms: int, waiting: int, in_class: Callable[[int], int]) -> None:
        """Record the number of requests that wait now, in all and by class. To be called whenever it changes,
        and regularly."""
        self._all.look(now_ms, waits=waiting > 0)
        for priority, known in self.classes.items():
            known.waits = in_class(priority) > 0

    def waits(self, priority: int) -> None:
        """Record that a request of this priority class waits now."""
        self._of(priority).waits = True

    def done(self, tokens: int) -> None:
        """Count `tokens` tokens of work done on rooms of any class."""
        self._all.done(tokens)

    def progressed(self, tokens: int, tokens_min: int) -> None:
        """Count `tokens` tokens of work done on rooms of any class. `tokens_min`: least work from which a
        throughput is estimated from now on, in tokens."""
        self._all.units_min = tokens_min
        if tokens:
            self._all.done(tokens)

    def served(self, priority: int | None, tokens: int) -> None:
        """Count a request that waited and got a room. `tokens`: its expected work. `priority`: its class,
        None if it had a room before."""
        for each, known in self.classes.items():
            known.served(tokens, is_own=each == priority)

    def wait_ms(self, ahead: QueuedWork, priority: int, tokens: int) -> int | None:
        """Return the expected wait of a request in milliseconds. None if no throughput was measured. `ahead`:
        work before it. `tokens`: its own work."""
        known = self.classes.get(priority)
        share = 1.0 if known is None else known.share()
        in_class = round((ahead.tokens_in_class + tokens) / share)
        return self._all.wait_ms(max(ahead.tokens + tokens, in_class))

    def come_back_ms(
        self, now_ms: int, ahead: QueuedWork, priority: int, tokens: int, may_wait_ms: int
    ) -> int | None:
        """Return after how many milliseconds a rejected client is to try again. None if no throughput was
        measured.

        By then the queue is short enough for `may_wait_ms`, and clients that were rejected earlier have been
        served.
        """
        one_ms = self.wait_ms(NOTHING_QUEUED, priority, tokens)
        wait_ms = self.wait_ms(ahead, priority, tokens)
        if one_ms is None or wait_ms is None:
            return None
        known = self._of(priority)
        soonest_ms = now_ms + max(wait_ms - may_wait_ms, one_ms)
        known.return_ms = min(max(soonest_ms, known.return_ms + one_ms), soonest_ms + SPREAD_MS)
        return known.return_ms - now_ms

    def _of(self, priority: int) -> _ClassShare:
        known = self.classes.setdefault(priority, _ClassShare())
        self.classes.move_to_end(priority)
        if len(self.classes) > CLASSES_MAX:
            self.classes.popitem(last=False)
        return known
