"""Which request gets the next room, and who waits for one?

The registry knows which pair of workers is best. Who fits none now waits in a bounded queue
(`bounded-admission`), which is looked at as soon as somebody says that there may be space. Who is next in it
is said by `baton.fleet.fair_queue`.
"""

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, TypeVar

from baton.bootstrap.metrics import BootstrapMetrics, RefusalReason
from baton.bootstrap.placement_request import NotInTime, PlacementRequest, QueueFull, Retry, WaitingRequest
from baton.bootstrap.timelines import Timelines
from baton.fleet.fair_queue import FairQueue, QueuedWork, QueueEntry, QueueKey
from baton.fleet.placement import Need, Pair
from baton.fleet.prefix_affinity import hash_blocks
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry
from baton.fleet.wait_estimator import WaitEstimator
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, NoCapacity, NoneReady, NoSuchWorker, Reason, Refusal, TooLarge
from baton.rooms.phases import Side
from baton.rooms.plurals import counted
from baton.rooms.timeline import Event, Moment
from baton.rooms.trace import TraceContext
from baton.runtime.clock import Clock

RETRY_AFTER_S_MAX: Final = 600
LOOKED_AT_MAX: Final = 64
"""How many that wait for other workers may be before one that there is space for."""
REJUDGED_MAX: Final = 64
"""Requests that one look turns away because the line got slower than it was expected to be."""
QUEUED_GONE: Final = Cause(Reason.CLIENT_GONE, "gone while queued")


K = TypeVar("K")


class Admission:
    """Opens every room. Used from one event loop."""

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
        """`max_wait_ms`: a request that is expected to wait longer is turned away at once; None: as
        `queue_timeout_ms`, which ends its wait in any case."""
        self._registry = registry
        self._clock = clock
        self._timelines = timelines
        self._metrics = metrics
        self._max_queue = max_queue
        self._queue_timeout_ms = queue_timeout_ms
        self.expected = WaitEstimator(queue_timeout_ms, max_wait_ms)
        """Told of the progress of rooms by whoever follows them."""
        self._line: FairQueue[WaitingRequest] = FairQueue()
        self._hoping: Counter[tuple[int, Side | None]] = Counter()
        """Requests that had a room, and wait for a side to have a ready worker again, by class and side."""
        self.retrying: Counter[RoomId] = Counter()
        """Rooms that failed, and for whose requests others are looked for: how many."""
        self._going_back: dict[Incarnation, dict[int, QueueEntry[WaitingRequest]]] = {}
        """Those in the line whose rooms a decode worker retracted, by that one, the first to come first."""
        self._outlook: Hashable = None
        """Of the registry, when those that wait were asked last whether there are workers for them."""
        self._heard: Hashable = None
        """The same, when those that hope for a worker were told last to look again."""
        self._paused: Counter[Incarnation | None] = Counter()
        """Requests that had a room and have no other yet, by the decode worker that retracted it, if one
        did."""
        self._owed: dict[RoomId, Incarnation] = {}
        """Rooms that ended early, and whose requests have not asked for the next one, since their readers are
        slow: by the decode worker that serves them to their end even while it drains."""
        self._news = asyncio.Event()
        """Set for a moment when a worker may have become ready, or have got space."""
        self._ending: Cause | None = None
        """Why no room is opened any more."""

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
        """Open a room on the best pair that can hold it, waiting in a bounded queue for capacity
        (`bounded-admission`). `prompt` and its `salt`: for the choice of workers, if they are known. `trace`:
        what the room's span is a part of. `tokens`: KV positions that each of the `choices` may come to take
        on decode. `priority`, `tenant`: as of a `QueueKey`. `arrived_ms`: by the wall clock; None: now.
        `may_be_local`, `scores`: as of a `Need`.

        `retry`: of a request that had a room. It comes before those that had none, which take it no place in
        the queue either: as many again may wait. It waits until its caller gives it up; where a side has no
        ready worker, for one to come. One that had no room waits for that only where a worker is expected.

        Raises NoSuchWorker, QueueFull, and TimeoutError when no pair had space in time. NotInTime, a
        QueueFull, at once, where that is to be expected.
        """
        margin = 0 if retry is None else retry.margin
        need = Need(
            prompt_tokens,
            tokens,
            choices=choices,
            margin=margin,
            may_be_local=may_be_local,
            scores=scores,
        )
        came_ms = self._clock.wall_ms() if arrived_ms is None else arrived_ms
        claim = QueueKey(priority, tenant, self.expected.cost(need), came_ms, had_room=retry is not None)
        asked = PlacementRequest(request_id, need, retry, prompt, salt, trace, claim)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        try:
            entry = await (self._open_in_turn(asked) if retry is None else self._open_again(asked, retry))
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
        self._metrics.admitted(priority, loop.time() - asked_s)
        return entry

    def open_on(self, request_id: str, pair: Pair, need: Need) -> RoomEntry:
        """Open a canary's room on exactly this pair, or on this decode worker alone."""
        entry = self._registry.open_room(request_id, pair, need, self._clock.now_ms(), canary=True)
        self._timelines.report(entry.id, Moment.OPENED, f"canary {entry.where}")
        return entry

    def discard(self, entry: RoomEntry, cause: Cause) -> None:
        """Close a room that no worker was told of."""
        self.expected.ended(entry.id, is_over=False)
        self._registry.end(entry.id, cause, self._clock.now_ms())
        self._timelines.end(entry.id, cause)
        for side in entry.sides:
            self._registry.side_retired(entry.id, side)
        self.wake()

    def drain(self, incarnation: Incarnation, *, broken: bool = False) -> int:
        """No newcomer gets a room on this worker any more. For how many it is to wait (`Registry.drain`).
        `broken`: it ends, and is likely to be started again."""
        if broken:
            self._registry.expect_back(incarnation, self._clock.now_ms())
        unread = sum(each == incarnation for each in self._owed.values())
        return self._registry.drain(incarnation, self._paused[incarnation] + unread)

    def owe(self, entry: RoomEntry) -> None:
        """The room ended early, and its request may go on on the same decode worker, which does not leave
        before: until it asks for its next room, or gives up."""
        self._owed[entry.id] = entry.decode.incarnation

    def settle(self, room: RoomId) -> None:
        """Nothing is owed any more for a room that ended."""
        self._owed.pop(room, None)

    def wake(self) -> None:
        """A worker may have become ready, or have got space, or be gone: open rooms for those who wait."""
        if self._hoping:
            heard = self._registry.outlook(self._clock.now_ms())
            if heard != self._heard or self._ending is not None:
                self._heard = heard
                self._news.set()
                self._news.clear()
        self._look()
        if len(self._line):
            self._serve_queue()
            self._turn_away_late()
            self._look()

    def retry_after_s(self, priority: int = 0, tenant: bytes = b"") -> int:
        """When a request of this class that is turned away now is to come back, to find a place. To be asked
        once for each: those that are turned away together do not come back together."""
        claim = QueueKey(priority, tenant, self.expected.usual_cost())
        away_ms = self.expected.come_back_ms(self._clock.now_ms(), self._ahead(claim), claim)
        return 1 if away_ms is None else min(max(-(-away_ms // 1000), 1), RETRY_AFTER_S_MAX)

    def close(self, why: Cause) -> None:
        """Open no room any more. Whoever waits for one is told why."""
        self._ending = why
        self.wake()

    def queued(self) -> int:
        """Requests that wait for a pair of workers."""
        return len(self._line) + self._hoping.total()

    def queued_by_class(self) -> Counter[int]:
        counts = self._line.by_class()
        for (priority, _), count in self._hoping.items():
            counts[priority] += count
        return counts

    def queued_by_side(self) -> Mapping[Side, int]:
        """The same: those that hope for a worker on its side, and the others on the side that has no space
        for whoever is first of them, if it is one alone."""
        counts: Counter[Side] = Counter()
        for (_, side), count in self._hoping.items():
            counts += Counter({} if side is None else {side: count})
        first = self._line.first()
        if first is None:
            return counts
        asked = first.waiting.request
        try:
            self._registry.place(asked.need, frozenset() if asked.retry is None else asked.retry.avoid)
        except (NoCapacity, NoneReady) as error:
            counts += Counter({} if error.side is None else {error.side: len(self._line)})
        except NoSuchWorker:
            pass
        return counts

    def waiting(self, *, had_none: bool = False) -> Iterator[tuple[str, Event]]:
        """Ids of those that wait in the queue, class by class and the oldest first, each with the line that
        says since when. `had_none`: those alone that had no room before."""
        return (
            (one.waiting.request.request_id, one.waiting.queued)
            for one in self._line
            if one.waiting.queued is not None and not (had_none and one.claim.had_room)
        )

    # ---- inside

    def _look(self) -> None:
        self.expected.look(self._clock.now_ms(), len(self._line), self._line.in_class)

    def _ahead(self, claim: QueueKey) -> QueuedWork:
        """Return who is before a newcomer. Those that hope for a worker are counted as large as it is."""
        ahead, hoping = self._line.ahead(claim), self._hoping.total()
        return ahead._replace(all=ahead.all + hoping, tokens=ahead.tokens + hoping * claim.tokens)

    async def _open_again(self, asked: PlacementRequest, retry: Retry) -> RoomEntry:
        """For a request that had a room, hoping for a worker where a side has none."""
        self.retrying[retry.room] += 1
        self._paused[retry.back] += 1
        self.settle(retry.room)
        try:
            await asyncio.sleep(retry.pause_s)
            until_s = None if retry.wait_s is None else asyncio.get_running_loop().time() + retry.wait_s
            while True:
                try:
                    return await self._open_in_turn(asked)
                except NoSuchWorker as error:
                    hopeless = isinstance(error, TooLarge) and not retry.fits
                    if hopeless or self._ending or not await self._worker_news(asked, error, until_s):
                        raise
        finally:
            _less(self.retrying, retry.room)
            _less(self._paused, retry.back)

    def _serve_queue(self) -> None:
        """Open rooms for those who wait and fit, in their order: who waits for some workers holds up nobody
        who fits others. To one that was retracted, and that decode has no space for, a decode worker is left:
        those behind it would take the space for it to come back to, one small room after the other.

        Where nobody can get a room, those behind the first who does not are looked at once after each change
        of the outlook: there may be no worker for them any more, and they are told so.
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
        """Open rooms for those who fit the worker that retracted theirs, and drains, and that were not looked
        at: whoever is before them may not go there."""
        for incarnation in self._registry.accepting_retracted():
            going_back = self._going_back.get(incarnation, {}).values()
            unseen = (each for each in going_back if not (each.is_skipped or each.waiting.opened.done()))
            for one in list(islice(unseen, LOOKED_AT_MAX)):
                self._serve(one)

    def _reserve(self, waiting: WaitingRequest, lacks: NoCapacity) -> None:
        """Where it was retracted, and `lacks` not only prefill, leave a decode worker to it for as long as
        this look takes."""
        need, retry = waiting.request.need, waiting.request.retry
        if retry is not None and not retry.is_attempt and lacks.side is not Side.PREFILL:
            waiting.reserved = self._registry.reserve(need, retry.avoid, waiting.reserved)

    def _serve(self, one: QueueEntry[WaitingRequest]) -> NoCapacity | None:
        """Open its room, or tell it why there will be none. Why it has to wait on, if it has to."""
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

    async def _open_in_turn(self, asked: PlacementRequest) -> RoomEntry:
        """At once, if there is space, which those before it did not fit; else when it is its turn."""
        fits = True
        try:
            pair = self._pair(asked)
            if not len(self._line):
                return self._open(asked, pair)
        except NoCapacity:
            fits = False
        if not len(self._line):
            self._outlook = self._registry.outlook(self._clock.now_ms())
        ahead = self._ahead(asked.claim)
        waiting = WaitingRequest(asked, asyncio.get_running_loop().create_future())
        one = self._line.enter(waiting, asked.claim)
        back = None if asked.retry is None else asked.retry.back
        if back is not None:
            self._going_back.setdefault(back, {})[one.number] = one
        try:
            if fits:
                self._serve_queue()
            if not waiting.opened.done():
                self._check_may_wait(asked, ahead)
                told = f"class {asked.claim.priority}, {ahead.all} before it"
                waiting.queued = self._timelines.line(Moment.QUEUED, told)
                if asked.retry is None:
                    self.expected.enters(asked.claim)
                self._look()
            return await self._turn(waiting)
        finally:
            self._line.leave(one)
            if back is not None:
                del self._going_back[back][one.number]
                if not self._going_back[back]:
                    del self._going_back[back]

    def _check_may_wait(self, asked: PlacementRequest, ahead: QueuedWork) -> None:
        """Raises QueueFull, also where the request, which is in the line, would wait too long."""
        line, hoping, claim = self._line, self._hoping.total(), asked.claim
        if asked.retry is None:
            others = line.count_up_to(claim.priority) - line.retried - 1
            is_full = others >= self._max_queue
        else:
            # One that was retracted is not turned away: there are no more of those than had a room.
            others = line.retried - 1 + hoping
            is_full = others >= self._max_queue and asked.retry.is_attempt
        if is_full:
            raise QueueFull(f"the queue for workers is full: {counted(others, 'request')}")
        self._look()
        wait_ms = self.expected.too_long_ms(ahead, claim)
        if wait_ms is not None:
            raise _not_in_time(wait_ms, ahead.all)
        if asked.retry is None and len(line) + hoping > 2 * self._max_queue:
            self._turn_away_last(claim)

    def _turn_away_last(self, claim: QueueKey) -> None:
        """One of a lower class, for the place of a newcomer. Raises QueueFull where there is none."""
        last = self._line.last()
        if last is None or last.claim.priority <= claim.priority:
            raise QueueFull(f"the queue for workers is full: {counted(len(self._line) - 1, 'request')}")
        self._line.leave(last)
        if not last.waiting.opened.done():
            text = "the queue for workers is full, and its place went to a request of a higher class"
            last.waiting.opened.set_exception(QueueFull(text))

    def _turn_away_late(self) -> None:
        """Turn away the newest of the lowest class while the line is expected to take longer than a request
        waits in it. So those that came before there was a pace, or before it fell, need not wait it out."""
        for _ in range(REJUDGED_MAX):
            last = self._line.last()
            if last is None:
                return
            everybody = self._line.in_all()
            wait_ms = self.expected.too_late_ms(everybody, last.claim)
            if wait_ms is None:
                return
            self._line.leave(last)
            if not last.waiting.opened.done():
                last.waiting.opened.set_exception(_not_in_time(wait_ms, everybody.all - 1))

    async def _turn(self, waiting: WaitingRequest) -> RoomEntry:
        opened, may_wait = waiting.opened, waiting.request.retry is None
        try:
            async with asyncio.timeout(self._queue_timeout_ms / 1000 if may_wait else None):
                return await opened
        except TimeoutError:
            if opened.cancelled():
                raise
            return await opened  # its turn came as its time ended
        except asyncio.CancelledError:
            if not opened.cancelled() and opened.exception() is None:
                self.discard(opened.result(), QUEUED_GONE)
            raise

    async def _worker_news(self, asked: PlacementRequest, lacks: NoSuchWorker, until_s: float | None) -> bool:
        """Wait until a worker may have become ready. False when it is too late for that, or too full."""
        bounded = asked.retry is None or asked.retry.is_attempt
        if bounded and self._line.retried + self._hoping.total() >= self._max_queue:
            return False
        hope = asked.claim.priority, lacks.side if isinstance(lacks, NoneReady) else None
        self._hoping[hope] += 1
        try:
            async with asyncio.timeout_at(until_s):
                await self._news.wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            _less(self._hoping, hope)

    def _pair(self, asked: PlacementRequest) -> Pair:
        """The best one. Raises NoCapacity, and NoSuchWorker where waiting in the line does not help."""
        if self._ending is not None:
            raise NoSuchWorker(self._ending.text)
        retry = asked.retry
        if asked.prompt and self._registry.uses_prefix_affinity:
            asked.need, asked.prompt = replace(asked.need, blocks=hash_blocks(asked.prompt, asked.salt)), ()
            if retry is not None and retry.back is not None:
                self._registry.record_computed(retry.back, asked.need.blocks)
        try:
            avoid, back = (frozenset(), None) if retry is None else (retry.avoid, retry.back)
            return self._registry.place(asked.need, avoid, back)
        except NoneReady as error:
            if retry is None and self._registry.expects(error.side, self._clock.now_ms()):
                raise NoCapacity(f"{error} yet") from error
            raise

    def _open(self, asked: PlacementRequest, pair: Pair) -> RoomEntry:
        retry = asked.retry
        entry = self._registry.open_room(
            asked.request_id,
            pair,
            asked.need,
            self._clock.now_ms(),
            retry_of=None if retry is None else retry.room,
            is_back=retry is not None and retry.back == pair[1].facts.incarnation,
            trace_id="" if asked.trace is None else asked.trace.trace_id,
        )
        self.expected.opened(entry.id, asked.need)
        self._timelines.begin(entry, asked.trace)
        where = entry.where
        if entry.choices > 1:
            where += f", {counted(entry.choices, 'choice')}"
        if retry is None:
            self._timelines.report(entry.id, Moment.OPENED, where)
        else:
            told = f"{where}, for room {retry.room}: {retry.reason.value}"
            self._timelines.report(entry.id, Moment.OPENED, told)
            if retry.is_attempt:
                self._timelines.report(retry.room, Moment.RETRIED, f"as room {entry.id} {where}")
                self._metrics.retried(retry.reason)
            else:
                self._timelines.report(retry.room, Moment.GOES_ON, f"as room {entry.id} {where}")
        return entry


def _less(counts: Counter[K], key: K) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _not_in_time(wait_ms: int, before: int) -> NotInTime:
    told = f"{counted(before, 'request')} before it"
    return NotInTime(f"it would wait {round(wait_ms / 1000, 1):g} s for workers: {told}")
