"""Expected waits of requests in the queue, and the bounds by which they are rejected.

The work before a request is divided by the throughput of late, while requests waited (`QueueThroughput`).
Both are counted in tokens (`RunningWork`).
"""

from collections.abc import Callable
from typing import Final

from baton.fleet.fair_queue import QueuedWork, QueueKey
from baton.fleet.need import Need
from baton.fleet.queue_throughput import QueueThroughput
from baton.fleet.running_work import MEMORY, OUTPUT_TOKENS, RunningWork
from baton.ids import RoomId

SURE: Final = 1.5
"""Safety factor. A request is queued if its expected wait, times this, is over before the queue's time-out. A
client that is rejected at once can go elsewhere; one that is rejected after a minute has lost it."""


class WaitEstimator:
    """Wait estimates of one queue. Time is an argument."""

    def __init__(self, queue_timeout_ms: int, max_wait_ms: int | None) -> None:
        """`queue_timeout_ms`: time-out of every wait. `max_wait_ms`: longest expected wait of a newcomer, if
        set."""
        sure_ms = round(queue_timeout_ms / SURE)
        self._newcomer_ms = sure_ms if max_wait_ms is None else min(sure_ms, max_wait_ms)
        self._last_ms = queue_timeout_ms if max_wait_ms is None else min(queue_timeout_ms, 2 * max_wait_ms)
        """Longest expected wait of the last request in the queue, before it is rejected."""
        self._work = RunningWork()
        self._pace = QueueThroughput()
        self._usual_cost = 0.0

    # ---- events

    def look(self, now_ms: int, waiting: int, in_class: Callable[[int], int]) -> None:
        """See `QueueThroughput.look`."""
        self._pace.look(now_ms, waiting, in_class)

    def enters(self, claim: QueueKey) -> None:
        """Note that a request waits from now on."""
        self._pace.waits(claim.priority)

    def leaves(self, claim: QueueKey) -> None:
        """Note that a request that waited gets a room."""
        self._pace.served(None if claim.had_room else claim.priority, claim.tokens)

    def opened(self, room: RoomId, need: Need) -> None:
        """Note that a request got this room."""
        cost = self.cost(need)
        self._usual_cost += (cost - self._usual_cost) / (MEMORY if self._usual_cost else 1)
        self._work.opened(room, _prompt(need), _longest(need), need.choices)
        self._count(0)

    def progressed(self, room: RoomId, tokens: int) -> None:
        """Note that output tokens of a room came. Its prompt was computed before the first of them."""
        self._count(self._work.progressed(room, tokens))

    def ended(self, room: RoomId, *, is_over: bool) -> None:
        """Note that a room ended. `is_over`: no other room continues its request."""
        self._count(self._work.ended(room, is_over=is_over))

    def _count(self, tokens: int) -> None:
        """Count work done. No estimate is given until as much work was done as a mean prompt takes: otherwise
        a few tokens of other answers would pass for all that the stack computes."""
        self._pace.progressed(tokens, self._work.running_prompt_tokens)

    # ---- estimates

    def cost(self, need: Need) -> int:
        """Return the expected work of a request in tokens, which its tenant pays for."""
        return _prompt(need) + self._work.output_tokens(_longest(need), need.choices)

    def too_long_ms(self, ahead: QueuedWork, claim: QueueKey) -> int | None:
        """Return the expected wait of a newcomer in milliseconds if it is longer than allowed."""
        if claim.had_room:
            return None
        wait_ms = self._pace.wait_ms(ahead, claim.priority, claim.tokens)
        return wait_ms if wait_ms is not None and wait_ms > self._newcomer_ms else None

    def too_late_ms(self, everybody: QueuedWork, last: QueueKey) -> int | None:
        """Return the expected wait of the last request in the queue if it is longer than allowed.

        `everybody`: all waiting requests, the last one among them. The queue gets longer than newcomers may
        wait before there is a throughput, and when it falls.
        """
        wait_ms = self._pace.wait_ms(everybody, last.priority, 0)
        return wait_ms if wait_ms is not None and wait_ms > self._last_ms else None

    def come_back_ms(self, now_ms: int, ahead: QueuedWork, claim: QueueKey) -> int | None:
        """Return how long a request that is rejected now is to stay away. See
        `QueueThroughput.come_back_ms`."""
        return self._pace.come_back_ms(now_ms, ahead, claim.priority, claim.tokens, self._newcomer_ms)

    def usual_cost(self) -> int:
        """Return the expected work of an unknown request: the mean of those before it."""
        return round(self._usual_cost) or self._work.output_tokens(OUTPUT_TOKENS, 1)


def _prompt(need: Need) -> int:
    """Return the work of the prompt in tokens. A scored token is computed and scored, so it counts twice."""
    return need.prompt_tokens + need.scores


def _longest(need: Need) -> int:
    """Return how many tokens each choice may draw."""
    return max(need.tokens - need.prompt_tokens + 1, 1)
