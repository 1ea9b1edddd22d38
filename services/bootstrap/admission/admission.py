"""Admission of requests: each gets a room at once, or waits in a bounded queue, or is rejected.

The registry chooses the pair of workers. A request that fits no pair now waits in a bounded queue
(`bounded-admission`), in the order of `baton.fleet.fair_queue`.
"""

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from baton.bootstrap.admission.counters import one_more
from baton.bootstrap.admission.decode_promises import DecodePromises
from baton.bootstrap.admission.placement_request import (
    NotInTime,
    PlacementRequest,
    QueueFull,
    Retry,
    WaitingRequest,
)
from baton.bootstrap.admission.queue_bounds import QueueBounds
from baton.bootstrap.admission.ready_wait import ReadyWait
from baton.bootstrap.metrics import BootstrapMetrics, RefusalReason
from baton.bootstrap.timelines import Timelines
from baton.fleet.fair_queue import FairQueue, QueuedWork, QueueEntry, QueueKey
from baton.fleet.need import Need
from baton.fleet.placement import Pair
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry
from baton.fleet.wait_estimator import WaitEstimator
from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import hash_blocks
from baton.rooms.errors import Cause, NoCapacity, NoneReady, NoSuchWorker, Reason, Refusal, TooLarge
from baton.rooms.phases import Side
from baton.rooms.plurals import counted
from baton.rooms.timeline import Event, Moment
from baton.rooms.trace import TraceContext
from baton.runtime.clock import Clock

RETRY_AFTER_S_MAX: Final = 600
LOOKED_AT_MAX: Final = 64
"""Most requests that one scan of the queue skips, since no worker has space for them, before it ends."""


class Admission:
    """Admission of requests to workers. It opens every room. Used from one event loop."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        timelines: Timelines,
        metrics: BootstrapMetrics,
        max_queue: int,
        queue_timeout_ms: int,
        max_wait_ms: int | None = None,
    ) -> None:
        """Make an admission with an empty queue. `max_wait_ms`: longest expected wait with which a new
        request is accepted. None: `queue_timeout_ms`, which ends every wait."""
        self._registry = registry
        self._clock = clock
        self._timelines = timelines
        self._metrics = metrics
        self.queue_timeout_s = queue_timeout_ms / 1000
        self.expected = WaitEstimator(queue_timeout_ms, max_wait_ms)
        """Estimator of how long requests will wait. Streams of rooms report their progress to it."""
        self._line: FairQueue[WaitingRequest] = FairQueue()
        self._ready_wait = ReadyWait()
        """Requests whose room failed and that wait until a side has a ready worker again."""
        self._bounds = QueueBounds(self._line, self.expected, self._ready_wait, max_queue)
        self.queue_counts = self._bounds.counts
        self.retrying: Counter[RoomId] = Counter()
        """Number of requests that are looking for their next room, by the id of the room that ended."""
        self.promises = DecodePromises()
        self._outlook: Hashable = None
        """Value of `Registry.outlook` at the last scan of the queue. Requests that no worker can hold are
        refused when it changes."""
        self._ending: Cause | None = None
        """Cause for which no more rooms are opened, while the router stops. None before."""

    async def admit(
        self,
        request_id: str,
        prompt_tokens: int,
        tokens: int,
        retry: Retry | None = None,
        prompt: Sequence[int] = (),
        salt: int = 0,
        trace: TraceContext | None = None,
        choices: int = 1,
        priority: int = 0,
        tenant: bytes = b"",
        arrived_ms: int | None = None,
        may_be_local: bool = False,
        scores: int = 0,
    ) -> RoomEntry:
        """Open a room on the best pair that can hold the request, after a wait in the bounded queue if there
        is no space (`bounded-admission`).

        `prompt`, `salt`: for the choice of workers, if known. `trace`: parent of the room's span. `tokens`:
        most KV positions of each of the `choices` on decode. `priority`, `tenant`: as in `QueueKey`.
        `arrived_ms`: arrival by the wall clock, None for now. `may_be_local`, `scores`: as in `Need`.

        `retry`: given for a request that had a room. It comes before new requests, and is not counted with
        them: as many again may wait. It waits until `Retry.until_s`, also for a side to get a ready worker. A
        new request waits for that only if a worker is expected.

        Raises NoSuchWorker, QueueFull, and TimeoutError if no pair had space in time. NotInTime, a QueueFull,
        is raised at once if that is to be expected.
        """
        margin = 0 if retry is None else retry.margin
        need = Need(
            prompt_tokens, tokens, choices=choices, margin=margin, may_be_local=may_be_local, scores=scores
        )
        came_ms = self._clock.wall_ms() if arrived_ms is None else arrived_ms
        claim = QueueKey(priority, tenant, self.expected.cost(need), came_ms, had_room=retry is not None)
        request = PlacementRequest(request_id, need, retry, prompt, salt, trace, claim)
        came_s = asyncio.get_running_loop().time()
        try:
            entry = await (self._open_in_turn(request) if retry is None else self._open_again(request, retry))
        except NoSuchWorker:
            self._metrics.refused(RefusalReason.NO_WORKER)
            raise
        except QueueFull as error:
            hopeless = isinstance(error, NotInTime)
            self._metrics.refused(RefusalReason.NOT_IN_TIME if hopeless else RefusalReason.QUEUE_FULL)
            raise
        except TimeoutError:
            self._metrics.refused(RefusalReason.TOO_LATE)
            raise
        self._metrics.admitted(priority, asyncio.get_running_loop().time() - came_s)
        return entry

    def open_on(self, request_id: str, pair: Pair, need: Need) -> RoomEntry:
        """Open the room of a canary (test request) on this pair, or this decode worker alone."""
        entry = self._registry.open_room(request_id, pair, need, self._clock.now_ms(), canary=True)
        self._timelines.report(entry.id, Moment.OPENED, f"canary {entry.where}")
        return entry

    def discard(self, entry: RoomEntry) -> None:
        """Close a room that was opened, but sent to no worker, because the client is gone."""
        cause = Cause(Reason.CLIENT_GONE, "gone while queued")
        self.expected.ended(entry.id, is_over=False)
        self._registry.end(entry.id, cause, self._clock.now_ms())
        self._timelines.end(entry.id, cause)
        for side in entry.sides:
            self._registry.side_retired(entry.id, side)
        self.wake()

    def drain(self, incarnation: Incarnation, *, broken: bool = False) -> int:
        """Give a worker no new rooms. Return how many rooms and requests it has to wait for
        (`Registry.drain`). `broken`: whether it is about to end, and likely to be restarted."""
        if broken:
            self._registry.expect_back(incarnation, self._clock.now_ms())
        return self._registry.drain(incarnation, self.promises.count(incarnation))

    def wake(self) -> None:
        """Scan the queue, because a worker may have become ready, have space, or be gone."""
        if self._ready_wait.total():
            self._ready_wait.wake(
                self._registry.outlook(self._clock.now_ms()), force=self._ending is not None
            )
        self._look()
        if len(self._line):
            self._serve_queue()
            self._bounds.reject_late()
            self._look()

    def retry_after_s(self, priority: int = 0, tenant: bytes = b"") -> int:
        """Return after how many seconds a rejected client is to try again. Call it once for each request:
        clients that are rejected together get different times."""
        claim = QueueKey(priority, tenant, self.expected.usual_cost())
        away_ms = self.expected.come_back_ms(self._clock.now_ms(), self._ahead(claim), claim)
        return 1 if away_ms is None else min(max(-(-away_ms // 1000), 1), RETRY_AFTER_S_MAX)

    def close(self, why: Cause) -> None:
        """Open no more rooms. All waiting requests are refused with the given reason."""
        self._ending = why
        self.wake()

    def queued(self) -> int:
        """Return the number of requests in the queue for a pair of workers."""
        return len(self._line) + self._ready_wait.total()

    def queued_by_class(self) -> Counter[int]:
        return self._line.by_class() + self._ready_wait.by_class()

    def queued_by_side(self) -> Mapping[Side, int]:
        """Return the number of waiting requests by the side that they lack. It has no ready worker, or no
        space for the first request of the queue. Requests that lack both sides are left out."""
        counts = self._ready_wait.by_side()
        if (first := self._line.first()) is None:
            return counts
        need, retry = first.waiting.request.need, first.waiting.request.retry
        try:
            self._registry.place(need, frozenset() if retry is None else retry.avoid)
        except (NoCapacity, NoneReady) as error:
            counts += Counter({} if error.side is None else {error.side: len(self._line)})
        except NoSuchWorker:
            pass
        return counts

    def waiting(self, *, had_none: bool = False) -> Iterator[tuple[str, Event]]:
        """Yield the ids of queued requests, class by class and the oldest first, each with its line for the
        timeline. `had_none`: only those that had no room before."""
        return (
            (one.waiting.request.request_id, one.waiting.queued)
            for one in self._line
            if one.waiting.queued is not None and not (had_none and one.claim.had_room)
        )

    # ---- inside

    def _look(self) -> None:
        self.expected.look(self._clock.now_ms(), len(self._line), self._line.in_class)

    def _ahead(self, claim: QueueKey) -> QueuedWork:
        """Return the number and the work of the requests that are served before a new one. Requests that wait
        for a ready worker count as if they had the size of the new one."""
        ahead, hoping = self._line.ahead(claim), self._ready_wait.total()
        return ahead._replace(all=ahead.all + hoping, tokens=ahead.tokens + hoping * claim.tokens)

    async def _open_again(self, request: PlacementRequest, retry: Retry) -> RoomEntry:
        """Open the next room of a request whose room ended, after its pause and a wait for a ready worker."""
        self.promises.withdraw(retry.room)
        with one_more(self.retrying, retry.room), self.promises.pause(retry.returns_to):
            async with asyncio.timeout_at(retry.until_s):
                await asyncio.sleep(retry.pause_s)
                return await self._open_when_ready(request, retry)

    async def _open_when_ready(self, request: PlacementRequest, retry: Retry) -> RoomEntry:
        until_s = None if retry.wait_s is None else asyncio.get_running_loop().time() + retry.wait_s
        while True:
            try:
                return await self._open_in_turn(request)
            except NoSuchWorker as error:
                hopeless = isinstance(error, TooLarge) and not retry.fit_before
                if hopeless or self._ending or not self._bounds.may_wait_for_ready(retry):
                    raise
                lacks = error.side if isinstance(error, NoneReady) else None
                if not await self._ready_wait.wait(request.claim.priority, lacks, until_s):
                    raise

    def _serve_queue(self) -> None:
        """Open rooms for queued requests that fit, in their order. A request that waits for some workers does
        not block those that fit others.

        For a retracted request without space on decode, a decode worker is reserved during the scan.
        Otherwise small requests behind it would take that space, one after the other. If no request can get a
        room, the rest of the queue is scanned once after each change of the outlook. Requests that no worker
        can hold any more are refused then.
        """
        outlook = self._registry.outlook(self._clock.now_ms())
        may_be_refused, self._outlook = outlook != self._outlook, outlook
        left = dict.fromkeys((True, False), LOOKED_AT_MAX)
        try:
            while (first := self._line.first()) is not None:
                if first.waiting.opened.done():
                    self._line.leave(first)
                elif (lacks := self._serve(first)) is not None:
                    had_room = first.claim.had_room
                    self._line.skip(first)
                    self._reserve(first.waiting, lacks)
                    left[had_room] -= 1
                    if self._registry.all_full and not may_be_refused:
                        break
                    if not left[had_room]:
                        if not had_room:
                            break
                        self._line.skip_retried()
            self._serve_back()
        finally:
            self._line.end_scan()
            self._registry.release_reserved()

    def _serve_back(self) -> None:
        """Open rooms on draining workers for those queued requests whose rooms these workers retracted.
        Called after a scan of the queue, for requests that it did not reach."""
        for incarnation in self._registry.accepting_retracted():
            for one in self.promises.unseen(incarnation, LOOKED_AT_MAX):
                self._serve(one)

    def _reserve(self, waiting: WaitingRequest, lacks: NoCapacity) -> None:
        """Reserve a decode worker for a retracted request during this scan of the queue, unless only prefill
        lacks space."""
        need, retry = waiting.request.need, waiting.request.retry
        if retry is not None and retry.is_retracted and lacks.side is not Side.PREFILL:
            waiting.reserved = self._registry.reserve(need, retry.avoid, waiting.reserved)

    def _serve(self, one: QueueEntry[WaitingRequest]) -> NoCapacity | None:
        """Open the room of a queued request, or refuse the request, and return None. If no pair has space for
        it, return the error that says what is lacking."""
        waiting = one.waiting
        try:
            entry = self._open(waiting.request, self._pair(waiting.request))
        except NoCapacity as lacks:
            return lacks
        except Refusal as error:
            self._line.leave(one)
            waiting.opened.set_exception(error)
            return None
        self._line.take(one)
        self.expected.leaves(one.claim)
        if waiting.queued is not None:
            self._registry.record(entry.id, waiting.queued)
        waiting.opened.set_result(entry)
        return None

    async def _open_in_turn(self, request: PlacementRequest) -> RoomEntry:
        """Open a request's room at once if it fits and those queued before it do not. Otherwise queue it, and
        open the room when its turn comes."""
        fits = True
        try:
            pair = self._pair(request)
            if not len(self._line):
                return self._open(request, pair)
        except NoCapacity:
            fits = False
        if not len(self._line):
            self._outlook = self._registry.outlook(self._clock.now_ms())
        ahead = self._ahead(request.claim)
        waiting = WaitingRequest(request, asyncio.get_running_loop().create_future())
        one = self._line.enter(waiting, request.claim)
        if request.retry is not None:
            self.promises.enter(request.retry.returns_to, one)
        try:
            if fits:
                self._serve_queue()
            if not waiting.opened.done():
                self._bounds.check_may_wait(request, ahead, self._clock.now_ms())
                detail = f"class {request.claim.priority}, {ahead.all} before it"
                waiting.queued = self._timelines.line(Moment.QUEUED, detail)
                if request.retry is None:
                    self.expected.enters(request.claim)
                self._look()
            return await self._turn(waiting)
        finally:
            self._line.leave(one)
            if request.retry is not None:
                self.promises.leave(request.retry.returns_to, one)

    async def _turn(self, waiting: WaitingRequest) -> RoomEntry:
        opened, is_new = waiting.opened, waiting.request.retry is None
        try:
            async with asyncio.timeout(self.queue_timeout_s if is_new else None):
                return await opened
        except TimeoutError:
            if opened.cancelled():
                raise
            return await opened  # its turn came as its time ended
        except asyncio.CancelledError:
            if not opened.cancelled() and opened.exception() is None:
                self.discard(opened.result())
            raise

    def _pair(self, request: PlacementRequest) -> Pair:
        """Return the best pair of workers for a request. Raises NoCapacity if waiting in the queue helps, and
        NoSuchWorker if it does not."""
        if self._ending is not None:
            raise NoSuchWorker(self._ending.text)
        retry = request.retry
        if request.prompt and self._registry.uses_prefix_affinity:
            request.need = replace(request.need, blocks=hash_blocks(request.prompt, request.salt))
            request.prompt = ()
            if retry is not None and retry.returns_to is not None:
                self._registry.record_computed(retry.returns_to, request.need.blocks)
        try:
            avoid, back = (frozenset(), None) if retry is None else (retry.avoid, retry.returns_to)
            return self._registry.place(request.need, avoid, back)
        except NoneReady as error:
            if retry is None and self._registry.expects(error.side, self._clock.now_ms()):
                raise NoCapacity(f"{error} yet") from error
            raise

    def _open(self, request: PlacementRequest, pair: Pair) -> RoomEntry:
        retry = request.retry
        entry = self._registry.open_room(
            request.request_id,
            pair,
            request.need,
            self._clock.now_ms(),
            retry_of=None if retry is None else retry.room,
            is_back=retry is not None and retry.returns_to == pair[1].facts.incarnation,
            trace_id="" if request.trace is None else request.trace.trace_id,
        )
        self.expected.opened(entry.id, request.need)
        self._timelines.begin(entry, request.trace)
        where = entry.where + (f", {counted(entry.choices, 'choice')}" if entry.choices > 1 else "")
        if retry is None:
            self._timelines.report(entry.id, Moment.OPENED, where)
        else:
            reason = Reason.WORKER_FULL if retry.is_refused else retry.reason
            self._timelines.report(entry.id, Moment.OPENED, f"{where}, for room {retry.room}: {reason.value}")
            if retry.is_attempt:
                self._timelines.report(retry.room, Moment.RETRIED, f"as room {entry.id} {where}")
                self._metrics.retried(retry.reason)
            else:
                self._timelines.report(retry.room, Moment.GOES_ON, f"as room {entry.id} {where}")
        return entry
