"""What happens at the bootstrap when a room opens, moves or ends, or a worker comes or goes?

The registry decides; this makes it so: it ends rooms of lost workers with the true cause, tells the other
side at once (`terminal-reaches-peer`), wakes who waits for capacity or watches a room, and keeps time.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import grpc

from services.bootstrap.links import Links
from services.bootstrap.metrics import BootstrapMetrics, Loss, Refused
from services.bootstrap.notebook import NOTHING_TOLD, Notebook
from services.rooms.errors import Cause, NoCapacity, NoSuchWorker, Reason, Refusal
from services.rooms.ids import Incarnation, RoomId
from services.rooms.phases import Side
from services.rooms.registry import Event, Registry, RoomEntry, Worker, WorkerFacts, WorkerState
from services.rooms.trace import TraceContext
from services.runtime.clock import Clock
from services.runtime.logging import Log
from services.runtime.party import Party
from services.runtime.room_spans import NO_ERRORS, RoomSpans
from services.runtime.tracing import Attribute
from services.wire.baton.v1 import inference_pb2, inference_pb2_grpc
from services.wire.channel import Channels
from services.wire.conversions import cause_to_wire

log = Log(__name__)

CANCEL_S: Final = 2.0
CANCEL_TRIES: Final = 3
TICK_S: Final = 0.25
LOOK_S: Final = 0.01
SOURCE: Final = "bootstrap"

LOST: Final = {Side.PREFILL: Reason.PREFILL_LOST, Side.DECODE: Reason.DECODE_LOST}


class QueueFull(Exception):
    """As many requests wait for a pair of workers as may."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Of a request that had a room: what the next one is to know of it."""

    room: RoomId
    reason: Reason
    avoid: frozenset[Incarnation]
    """Workers that get the request only if there are no others."""
    wait_s: float
    """How long a side without a ready worker is hoped to get one."""


@dataclass(frozen=True, slots=True)
class _Asked:
    request_id: str
    prompt_tokens: int
    tokens: int
    retry: Retry | None
    prompt: Sequence[int]
    trace: TraceContext | None


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that fits a pair of workers, but not now."""

    asked: _Asked
    opened: asyncio.Future[RoomEntry]
    queued: Event
    """The line of its timeline that says so."""


class Rooms:
    """The bootstrap's only writer of the registry. Used from one event loop."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        channels: Channels,
        metrics: BootstrapMetrics,
        max_queue: int,
        queue_timeout_ms: int,
        spans: RoomSpans | None = None,
    ) -> None:
        self.registry = registry
        self.spans = RoomSpans() if spans is None else spans
        self.links = Links(channels)
        self.notebook = Notebook()
        self._clock = clock
        self._channels = channels
        self._metrics = metrics
        self._max_queue = max_queue
        self._queue_timeout_s = queue_timeout_ms / 1000
        self._queue: deque[_Waiting] = deque()
        """Those that had a room before come first: their clients have waited longest."""
        self._hoping = 0
        """Requests that had a room, and wait for a side to have a ready worker again."""
        self.retrying: set[RoomId] = set()
        """Rooms that failed, and for whose requests another is looked for."""
        self._news = asyncio.Event()
        """Set for a moment when a worker may have become ready, or have got space."""
        self._on_end: dict[RoomId, Callable[[Cause], None]] = {}
        self._watchers: dict[RoomId, dict[asyncio.Event, None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: Cause | None = None
        """Why no room is opened any more."""

    # ---- workers

    def register(self, facts: WorkerFacts) -> None:
        self.registry.register(facts, self._clock.now_ms())
        log.info("worker registered", worker=facts.name, side=facts.side.value, address=facts.address)
        self._wake_queue()

    def renew(self, incarnation: Incarnation, census: Mapping[str, Any] = NOTHING_TOLD) -> None:
        """`census`: what the worker says that it holds."""
        self.registry.renew(incarnation, self._clock.now_ms())
        self.notebook.heard(incarnation, census, self._clock.now_ms())
        self._metrics.lease_renewed()
        self._wake_queue()

    def proven(self, incarnation: Incarnation) -> None:
        """A canary hand-over passed: the worker may have rooms."""
        worker = self.registry.worker(incarnation)
        if worker.state is WorkerState.JOINING:
            log.info("worker ready", worker=worker.facts.name)
        self.registry.proven(incarnation)
        self._wake_queue()

    def exited(self, name: str, pid: int) -> None:
        """Whoever started the worker saw its process exit."""
        for incarnation in self.registry.exited(name, pid):
            self.lose(incarnation, "its process exited", proof="exited")

    def lose(self, incarnation: Incarnation, why: str, *, proof: str | None) -> None:
        """A worker is gone, or silent for too long. Its rooms end now, with that cause."""
        facts = next((w.facts for w in self.registry.workers() if w.facts.incarnation == incarnation), None)
        rooms = self.registry.leave(incarnation, proof)
        if facts is None:
            return
        log.warning("worker lost", worker=facts.name, cause=why, rooms=len(rooms))
        self.notebook.worker_lost(facts, why, self._clock.wall_ms(), len(rooms))
        self._metrics.worker_lost(facts.side, Loss.SILENT if proof is None else Loss(proof))
        for entry in rooms:
            cause = Cause(LOST[facts.side], f"{facts.side.value} worker {facts.name}: {why}")
            self.fail(entry.id, cause)
            self._wake_watchers(entry.id)
        self.links.drop(incarnation)
        self._wake_queue()

    # ---- rooms

    async def admit(
        self,
        request_id: str,
        prompt_tokens: int,
        tokens: int,
        retry: Retry | None = None,
        prompt: Sequence[int] = (),
        trace: TraceContext | None = None,
    ) -> RoomEntry:
        """Open a room on the best pair that can hold it, waiting in a bounded queue for capacity
        (`bounded-admission`). `prompt`: for the choice of workers, if it is known. `trace`: what the room's
        span is a part of.

        `retry`: of a request that had a room. It comes before those that had none, and where a side has no
        ready worker it waits for one for a while.

        Raises NoSuchWorker, QueueFull, and TimeoutError when no pair had space in time.
        """
        asked = _Asked(request_id, prompt_tokens, tokens, retry, prompt, trace)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        hopes_until_s = asked_s + (0.0 if retry is None else retry.wait_s)
        while True:
            try:
                entry = await self._admit(asked)
            except NoSuchWorker:
                if retry is None or self._ending or not await self._worker_news(hopes_until_s):
                    self._metrics.refused(Refused.NO_WORKER)
                    raise
            except (QueueFull, TimeoutError) as error:
                full = isinstance(error, QueueFull)
                self._metrics.refused(Refused.QUEUE_FULL if full else Refused.TOO_LATE)
                raise
            else:
                self._metrics.admitted(loop.time() - asked_s)
                return entry

    async def _admit(self, asked: _Asked) -> RoomEntry:
        first = self._queue[0].asked if self._queue else None
        if first is None or (first.retry is None and asked.retry is not None):
            try:
                return self._open(asked)
            except NoCapacity:
                pass
        if self.queued() >= self._max_queue:
            raise QueueFull(f"{self.queued()} requests are waiting for workers")
        opened: asyncio.Future[RoomEntry] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(asked, opened, self.line("queued", f"{self.queued()} before it"))
        if asked.retry is None:
            self._queue.append(waiting)
        else:
            self._queue.insert(sum(each.asked.retry is not None for each in self._queue), waiting)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await opened
        except BaseException:
            if opened.done() and not opened.cancelled() and opened.exception() is None:
                self.discard(opened.result())
            raise
        finally:
            # Whoever opened it took it out: the queue is not searched for those who got a room.
            if opened.cancelled() and waiting in self._queue:
                self._queue.remove(waiting)

    async def _worker_news(self, until_s: float) -> bool:
        """Wait until a worker may have become ready. False when it is too late for that, or too full."""
        if self.queued() >= self._max_queue:
            return False
        self._hoping += 1
        try:
            async with asyncio.timeout_at(until_s):
                await self._news.wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self._hoping -= 1

    def open_on(self, request_id: str, pair: tuple[Worker, Worker], tokens: int) -> RoomEntry:
        """Open a canary's room on exactly this pair."""
        entry = self.registry.open_room(request_id, pair, tokens, self._clock.now_ms(), canary=True)
        self.tell(entry.id, "opened", f"canary on {entry.prefill.name} and {entry.decode.name}")
        return entry

    def discard(self, entry: RoomEntry) -> None:
        """Close a room that no worker was told of."""
        cause = Cause(Reason.CLIENT_GONE, "gone while queued")
        self.registry.end(entry.id, cause, self._clock.now_ms())
        self._end_span(entry.id, cause)
        for side in Side:
            self.registry.side_retired(entry.id, side)
        self._wake_queue()

    def follow(self, room: RoomId, on_end: Callable[[Cause], None]) -> None:
        """Call `on_end` when the room is failed from outside its own streams: at once if it was, between its
        opening and this."""
        cause = self.registry.get(room).cause
        if cause is None:
            self._on_end[room] = on_end
        else:
            on_end(cause)

    def refused(self, request_id: str, why: str, status: int, since_ms: int) -> None:
        """A request that came at `since_ms` gets no room; its client is told so with `status`."""
        waited_ms = self._clock.now_ms() - since_ms
        self.notebook.refuse(request_id, why, status, self._clock.wall_ms(), waited_ms)

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def line(self, name: str, detail: str = "") -> Event:
        """The bootstrap's own line of a timeline, of this moment."""
        return Event(self._clock.wall_ms(), SOURCE, name, detail, self._clock.host_us())

    def tell(self, room: RoomId, name: str, detail: str = "") -> None:
        """Add the bootstrap's own line to a room's timeline."""
        self.spans.event(room, name, detail)
        self.record(room, self.line(name, detail))

    def record(self, room: RoomId, event: Event) -> None:
        if self.registry.record(room, event):
            self._wake_watchers(room)

    def answered(self, room: RoomId, how: str = "") -> bool:
        """The client has all that it asked for. False when the room had ended before."""
        self._on_end.pop(room, None)
        ended = self.registry.end(room, None, self._clock.now_ms())
        if ended:
            self.tell(room, "answered", how)
            self.spans.end(room)
        return ended

    def stop(self, room: RoomId) -> None:
        """The client has all that it asked for, and the workers do not know it: stop them."""
        cause = Cause(Reason.ANSWERED, "a stop string was reached")
        if self.answered(room, cause.text):
            self._cancel_sides(room, cause)

    def fail(self, room: RoomId, cause: Cause) -> None:
        """End a room with its first cause, tell both sides, and whoever follows it. Idempotent."""
        if not self.registry.end(room, cause, self._clock.now_ms()):
            return
        self.tell(room, "failed", f"{cause.reason.value}: {cause.text}")
        self._end_span(room, cause)
        write = log.debug if cause.reason in NO_ERRORS else log.warning
        write("room failed", room=room, reason=cause.reason.value, cause=cause.text)
        self._metrics.room_failed(cause, canary=self.registry.get(room).canary)
        self._cancel_sides(room, cause)
        on_end = self._on_end.pop(room, None)
        if on_end is not None:
            on_end(cause)

    def fail_rest(self, entry: RoomEntry, cause: Cause) -> None:
        """One side failed after the room was answered: the other has nothing to wait for any more."""
        if entry.cause is None and entry.waiting_for and cause.reason is not Reason.ANSWERED:
            self._cancel_sides(entry.id, cause)

    def side_retired(self, room: RoomId, side: Side) -> None:
        self.registry.side_retired(room, side)
        self._wake_watchers(room)
        self._wake_queue()

    def watch(self, room: RoomId, changed: asyncio.Event) -> None:
        self._watchers.setdefault(room, {})[changed] = None

    def unwatch(self, room: RoomId, changed: asyncio.Event) -> None:
        watchers = self._watchers.get(room, {})
        watchers.pop(changed, None)
        if not watchers:
            self._watchers.pop(room, None)

    # ---- time

    def queued(self) -> int:
        """Requests that wait for a pair of workers."""
        return len(self._queue) + self._hoping

    def waiting(self) -> Iterator[tuple[str, Event]]:
        """Ids of those that wait in the queue, in its order, each with the line that says since when."""
        return ((each.asked.request_id, each.queued) for each in self._queue)

    async def keep_time(self) -> None:
        """Expire leases and overdue rooms, and look at the queue again, until cancelled."""
        while True:
            now_ms = self._clock.now_ms()
            for incarnation in self.registry.expired(now_ms):
                self.lose(incarnation, "its lease ran out", proof=None)
            for entry in self.registry.unended(now_ms):
                self.fail(entry.id, Cause(Reason.DEADLINE, "nobody ended the room in time"))
            for entry in self.registry.overdue(now_ms):
                sides = ", ".join(sorted(side.value for side in entry.waiting_for))
                self.tell(entry.id, "filed", f"not reported retired by {sides}")
                self.registry.abandon(entry.id)
                self._wake_watchers(entry.id)
            self._wake_queue()
            self._drop_channels()
            await asyncio.sleep(TICK_S)

    def end_all(self, cause: Cause) -> None:
        """The process ends before all that was promised is kept (`drain-keeps-promises`): whoever is served,
        or waits to be, is told so while there is time for it."""
        self._ending = cause
        self._wake_queue()
        for entry in list(islice(self.registry.rooms(), self.registry.open_count())):
            self.fail(entry.id, cause)

    async def finish(self) -> None:
        """Wait for the calls that are under way, and for the last words of rooms."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self.links.rooms():  # noqa: ASYNC110 - once, while the process ends
            await asyncio.sleep(LOOK_S)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something whose end nobody waits for; it is kept alive, and its failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    # ---- inside

    def _open(self, asked: _Asked) -> RoomEntry:
        if self._ending is not None:
            raise NoSuchWorker(self._ending.text)
        retry = asked.retry
        prompt = self.registry.blocks(asked.prompt)
        pair = self.registry.place(
            asked.prompt_tokens, asked.tokens, avoid=() if retry is None else retry.avoid, prompt=prompt
        )
        entry = self.registry.open_room(
            asked.request_id,
            pair,
            asked.tokens,
            self._clock.now_ms(),
            retry_of=None if retry is None else retry.room,
            prompt=prompt,
            trace_id="" if asked.trace is None else asked.trace.trace_id,
        )
        self.spans.begin(entry.id, entry.request_id, asked.trace, _attributes(entry))
        where = f"on {entry.prefill.name} and {entry.decode.name}"
        if retry is None:
            self.tell(entry.id, "opened", where)
        else:
            self.tell(entry.id, "opened", f"{where}, for room {retry.room}: {retry.reason.value}")
            self.tell(retry.room, "retried", f"as room {entry.id} {where}")
            self._metrics.retried(retry.reason)
        return entry

    def _end_span(self, room: RoomId, cause: Cause) -> None:
        self.spans.fail(room, cause)
        self.spans.end(room)

    def _wake_queue(self) -> None:
        """Open rooms for those who wait, oldest first, until one does not fit."""
        self._news.set()
        self._news.clear()
        while self._queue:
            head = self._queue[0]
            if head.opened.done():
                self._queue.popleft()
                continue
            try:
                entry = self._open(head.asked)
                self.registry.record(entry.id, head.queued)
                head.opened.set_result(entry)
            except NoCapacity:
                return
            except Refusal as error:
                head.opened.set_exception(error)
            self._queue.popleft()

    def _drop_channels(self) -> None:
        """Close the ways to addresses where no worker is any more and no open room has one."""
        needed = {worker.facts.address for worker in self.registry.workers()}
        for address in [each for each in self._channels.addresses() if each not in needed]:
            open_rooms = islice(self.registry.rooms(), self.registry.open_count())
            if not any(address in (each.prefill.address, each.decode.address) for each in open_rooms):
                self.spawn(self._channels.drop(address))

    def _wake_watchers(self, room: RoomId) -> None:
        for changed in self._watchers.get(room, ()):
            changed.set()

    def _cancel_sides(self, room: RoomId, cause: Cause) -> None:
        entry = self.registry.get(room)
        known = self._incarnations()
        for side in [each for each in Side if each in entry.waiting_for]:
            facts = entry.worker(side)
            if facts.incarnation in known:
                self.spawn(self._cancel(facts, room, cause))

    def _incarnations(self) -> set[Incarnation]:
        return {worker.facts.incarnation for worker in self.registry.workers()}

    async def _cancel(self, facts: WorkerFacts, room: RoomId, cause: Cause) -> None:
        """Best effort: a worker that cannot be told loses its lease, or its stream, soon."""
        request = inference_pb2.CancelRequest(
            room=room, incarnation=facts.incarnation, cause=cause_to_wire(cause)
        )
        channel = self._channels.to(facts.address, Party.of(facts.side))
        stub = (
            inference_pb2_grpc.PrefillServiceStub(channel)
            if facts.side is Side.PREFILL
            else inference_pb2_grpc.DecodeServiceStub(channel)
        )
        for attempt in range(CANCEL_TRIES):
            if facts.incarnation not in self._incarnations():
                return  # it is gone meanwhile, and so is the way to it
            try:
                reply = await stub.Cancel(request, timeout=CANCEL_S)
            except grpc.aio.AioRpcError as error:
                log.debug("cancel not taken", room=room, worker=facts.name, cause=error.details())
                await asyncio.sleep(0.1 * 2**attempt)
            else:
                if reply.absent:
                    # The call that opens it was lost on the way: there is nothing to be reported.
                    self.side_retired(room, facts.side)
                return

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background call failed", error=task.exception())


def _attributes(entry: RoomEntry) -> dict[str, Attribute]:
    """Of a room's span."""
    workers: dict[str, Attribute] = {"baton.prefill": entry.prefill.name, "baton.decode": entry.decode.name}
    return workers if entry.retry_of is None else workers | {"baton.retry_of": str(entry.retry_of)}
