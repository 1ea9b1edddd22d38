"""Bounds of the queue for workers: which requests may wait, and which are rejected.

The number of waiting requests is bounded, and so is the expected wait of each (`bounded-admission`).
"""

from typing import Final

from baton.bootstrap.admission.placement_request import (
    PlacementRequest,
    QueueFull,
    Retry,
    WaitingRequest,
    not_in_time,
)
from baton.bootstrap.admission.ready_wait import ReadyWait
from baton.bootstrap.stack_metrics import QueueCounts
from baton.fleet.fair_queue import FairQueue, QueuedWork, QueueKey
from baton.fleet.wait_estimator import WaitEstimator
from baton.rooms.plurals import counted

REJUDGED_MAX: Final = 64
"""Most queued requests that one call rejects because the queue became slower than expected."""


class QueueBounds:
    """Bounds of the queue for workers. Requests that wait for a worker to become ready are counted, too."""

    def __init__(
        self,
        line: FairQueue[WaitingRequest],
        expected: WaitEstimator,
        ready_wait: ReadyWait,
        max_queue: int,
    ) -> None:
        """Make the bounds. `max_queue`: most new requests of a class and those above it. As many retried
        requests of all classes may wait in addition."""
        self._line = line
        self._expected = expected
        self._ready_wait = ready_wait
        self._max_queue = max_queue

    def counts(self) -> QueueCounts:
        """Return the number of waiting requests, and of their prompt tokens to compute or to score."""
        needs = [one.waiting.request.need for one in self._line]
        tokens = sum(each.prompt_tokens + each.scores for each in needs)
        return QueueCounts(len(needs) + self._ready_wait.total(), tokens)

    def check_may_wait(self, request: PlacementRequest, ahead: QueuedWork, now_ms: int) -> None:
        """Check that a request that has just entered the queue may stay there.

        `ahead`: number and work of the requests before it. Raises QueueFull if the queue is full, and
        NotInTime if the request is expected to wait too long. If the queue is full, a request of a lower
        class is rejected in its place, if there is one.
        """
        line, hoping, claim = self._line, self._ready_wait.total(), request.claim
        if request.retry is None:
            others = line.count_up_to(claim.priority) - line.retried - 1
            is_full = others >= self._max_queue
        else:
            # A retracted request is never rejected. There are at most as many as had a room.
            others = line.retried - 1 + hoping
            is_full = others >= self._max_queue and not request.retry.is_retracted
        if is_full:
            raise QueueFull(f"the queue for workers is full: {counted(others, 'request')}")
        self._expected.look(now_ms, len(line), line.in_class)
        wait_ms = self._expected.too_long_ms(ahead, claim)
        if wait_ms is not None:
            raise not_in_time(wait_ms, ahead.all)
        if request.retry is None and len(line) + hoping > 2 * self._max_queue:
            self._reject_last(claim)

    def may_wait_for_ready(self, retry: Retry) -> bool:
        """Return whether a request whose last room ended may wait for a side to have a ready worker."""
        others = self._line.retried + self._ready_wait.total()
        return retry.is_retracted or others < self._max_queue

    def reject_late(self) -> None:
        """Reject requests, the newest of the lowest class first, as long as the last one is expected to wait
        too long.

        Such requests were accepted before the throughput was known, or before it fell.
        """
        for _ in range(REJUDGED_MAX):
            last = self._line.last()
            if last is None:
                return
            everybody = self._line.in_all()
            wait_ms = self._expected.too_late_ms(everybody, last.claim)
            if wait_ms is None:
                return
            self._line.leave(last)
            if not last.waiting.opened.done():
                last.waiting.opened.set_exception(not_in_time(wait_ms, everybody.all - 1))

    def _reject_last(self, claim: QueueKey) -> None:
        """Reject the last request of a lower class, to make space in the queue for a new one. Raises
        QueueFull if there is none."""
        last = self._line.last()
        if last is None or last.claim.priority <= claim.priority:
            raise QueueFull(f"the queue for workers is full: {counted(len(self._line) - 1, 'request')}")
        self._line.leave(last)
        if not last.waiting.opened.done():
            text = "the queue for workers is full, and its place went to a request of a higher class"
            last.waiting.opened.set_exception(QueueFull(text))
