"""Expected waits of requests in the queue for workers, and the bounds by which requests are rejected.

The expected wait is the work before a request, divided by the recent throughput while requests waited
(`QueueThroughput`). Both are counted in tokens (`RunningWork`).
"""

from collections.abc import Callable
from typing import Final

from baton.fleet.fair_queue import QueuedWork, QueueKey
from baton.fleet.need import Need
from baton.fleet.queue_throughput import QueueThroughput
from baton.fleet.running_work import MEMORY, OUTPUT_TOKENS, RunningWork
from baton.ids import RoomId

SURE: Final = 1.5
"""Safety factor on expected waits. A request may wait only if its expected wait, times this factor, is
shorter than the queue's time-out.

A client that is rejected at once can go elsewhere. One that is rejected after a minute has lost that minute.
"""


class WaitEstimator:
    """Estimates of waits in the queue for workers. Time is an argument."""

    def __init__(self, queue_timeout_ms: int, max_wait_ms: int | None) -> None:
        """Make an estimator without measurements. `queue_timeout_ms`: time-out of every wait. `max_wait_ms`:
        longest expected wait with which a new request is accepted, None if not set."""
        sure_ms = round(queue_timeout_ms / SURE)
        self._newcomer_ms = sure_ms if max_wait_ms is None else min(sure_ms, max_wait_ms)
        self._last_ms = queue_timeout_ms if max_wait_ms is None else min(queue_timeout_ms, 2 * max_wait_ms)
        """Longest wait in milliseconds that may be expected of the last request in the queue. If more is
        expected, that request is rejected."""
        self._work = RunningWork()
        self._pace = QueueThroughput()
        self._usual_cost = 0.0

    # ---- events

    def look(self, now_ms: int, waiting: int, in_class: Callable[[int], int]) -> None:
        """Record the number of requests that wait now (see `QueueThroughput.look`)."""
        self._pace.look(now_ms, waiting, in_class)

    def enters(self, claim: QueueKey) -> None:
        """Record that a request with this key has entered the queue."""
        self._pace.waits(claim.priority)

    def leaves(self, claim: QueueKey) -> None:
        """Record that a request with this key has left the queue because it got a room."""
        self._pace.served(None if claim.had_room else claim.priority, claim.tokens)

    def opened(self, room: RoomId, need: Need) -> None:
        """Record that a room was opened for a request with this need, so that its work is expected."""
        cost = self.cost(need)
        self._usual_cost += (cost - self._usual_cost) / (MEMORY if self._usual_cost else 1)
        self._work.opened(room, _prompt(need), _longest(need), need.choices)
        self._count(0)

    def progressed(self, room: RoomId, tokens: int) -> None:
        """Record `tokens` new output tokens of a room. Its prompt counts as computed with the first of
        them."""
        done = self._work.progressed(room, tokens)
        if done == tokens:
            self._pace.done(tokens)  # no prompt was computed, so the mean of those that run is as it was
        else:
            self._count(done)

    def ended(self, room: RoomId, *, is_over: bool) -> None:
        """Record that a room ended. `is_over`: whether no other room continues its request."""
        self._count(self._work.ended(room, is_over=is_over))

    def _count(self, tokens: int) -> None:
        """Count tokens of work done. No wait is estimated before as much work was done as a mean prompt
        takes. Otherwise, a few output tokens would count as the whole throughput of the stack."""
        self._pace.progressed(tokens, self._work.running_prompt_tokens)

    # ---- estimates

    def cost(self, need: Need) -> int:
        """Return the expected work of a request in tokens. Its tenant pays for as many."""
        return _prompt(need) + self._work.output_tokens(_longest(need), need.choices)

    def too_long_ms(self, ahead: QueuedWork, claim: QueueKey) -> int | None:
        """Return the expected wait of a new request in milliseconds, if it is too long for the request to be
        accepted. Otherwise return None."""
        if claim.had_room:
            return None
        wait_ms = self._pace.wait_ms(ahead, claim.priority, claim.tokens)
        return wait_ms if wait_ms is not None and wait_ms > self._newcomer_ms else None

    def too_late_ms(self, everybody: QueuedWork, last: QueueKey) -> int | None:
        """Return the expected wait of the last request in the queue in milliseconds if it is longer than
        allowed, or None.

        `everybody`: all waiting requests, including the last one. Waits can become too long after requests
        were accepted: the throughput was unknown then, or has fallen since.
        """
        wait_ms = self._pace.wait_ms(everybody, last.priority, 0)
        return wait_ms if wait_ms is not None and wait_ms > self._last_ms else None

    def come_back_ms(self, now_ms: int, ahead: QueuedWork, claim: QueueKey) -> int | None:
        """Return after how many milliseconds a client that is rejected now is to try again (see
        `QueueThroughput.come_back_ms`)."""
        return self._pace.come_back_ms(now_ms, ahead, claim.priority, claim.tokens, self._newcomer_ms)

    def usual_cost(self) -> int:
        """Return the expected work of a request that is not known yet, in tokens: the mean of earlier
        ones."""
        return round(self._usual_cost) or self._work.output_tokens(OUTPUT_TOKENS, 1)


def _prompt(need: Need) -> int:
    """Return the work of a request's prompt in tokens. A scored token is computed and scored, so it counts
    twice."""
    return need.prompt_tokens + need.scores


def _longest(need: Need) -> int:
    """Return the most output tokens that each choice of a request may have."""
    return max(need.tokens - need.prompt_tokens + 1, 1)
