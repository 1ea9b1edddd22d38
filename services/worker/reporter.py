"""Timeline lines of a worker, sent to the bootstraps in parallel with the turns.

Each line goes to the bootstrap that opened its room, and to no other (`opener-owns`). Lines go into a bounded
queue for each bootstrap and leave in batches. When a queue is full, lines are dropped and counted. The news
that a room is retired is never dropped, because the bootstrap waits for it. When a bootstrap's process is
gone, its lines are dropped and counted. The leader reports the actions that all ranks take together. Each
rank reports its own evidence and votes.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

import grpc

from baton.ids import NO_OPENER, Incarnation, Opener, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Vote
from baton.rooms.reasons import REASONS
from baton.rooms.request import Request
from baton.rooms.room import Room
from baton.rooms.timeline import Moment
from baton.runtime.clock import Clock
from baton.runtime.logging import Log
from baton.telemetry.room_spans import RoomSpans
from baton.wire.baton.v1 import rooms_pb2
from baton.worker.report_queue import ReportLine, ReportQueue

log = Log(__name__)

DETAIL_CHARS_MAX: Final = 512
UNKNOWN_MS: Final = 60_000
"""Time for which lines are kept for a bootstrap whose address is not known yet, in milliseconds. A room can
arrive before the answer that names its bootstrap."""
UNKNOWN_MAX: Final = 16
"""Most bootstraps without a known address for which lines are kept."""
LOOK_S: Final = 5.0


class Reporter:
    """Queues of a worker's timeline lines, and the tasks that send them. `report` and `retired` are cheap and
    never wait."""

    def __init__(
        self,
        connect: Callable[[str], grpc.aio.Channel],
        incarnation: Incarnation,
        source: str,
        clock: Clock,
        spans: RoomSpans | None = None,
        credential: bytes = b"",
    ) -> None:
        """Make a reporter that knows no bootstrap (see `use`).

        `connect`: returns a channel to the bootstrap at an address, with the present certificate. `spans`:
        receives the lines of traced rooms as well. `credential`: proof that it reports for its worker.
        """
        self._clock = clock
        self._connect = connect
        self._spans = RoomSpans() if spans is None else spans
        self._incarnation = incarnation
        self._credential = credential
        self._rank = 0
        self._source = source
        self._queues: dict[Opener, ReportQueue] = {}
        """Lines for each bootstrap, by its opener."""
        self._unknown_ms: dict[Opener, int] = {}
        """Bootstraps whose address is not known yet, each with the time of its first line."""
        self._addresses: dict[Opener, str] = {}
        self._gone: set[Opener] = set()
        self._openers: dict[RoomId, Opener] = {}
        """Opener of each room that has not been reported retired."""
        self._changed = asyncio.Event()
        self.load: Callable[[Opener], rooms_pb2.WorkerLoad | None] = lambda _: None
        """Function that returns the worker's load for one bootstrap. It is sent with batches in which rooms
        ended. It returns None if the bootstrap gets the load in another way."""
        self.dropped = 0
        """Number of timeline lines since the start that were lost before the bootstrap had them."""

    @property
    def pending(self) -> list[ReportLine]:
        """Lines that wait to be sent, of all bootstraps."""
        return [line for queue in self._queues.values() for line in queue.pending]

    def use(
        self,
        routers: Mapping[Opener, str],
        gone: Collection[Opener] = (),
        *,
        is_only_one: bool = False,  # noqa: ARG002
    ) -> None:
        """Send to these bootstraps from now on.

        `routers`: address of each, by its opener. `gone`: openers whose processes are gone. Their lines are
        dropped. `is_only_one`: whether the leader knows one address only.
        """
        self._gone = set(gone) - routers.keys()
        for opener in self._gone & self._queues.keys():
            self._forget(opener)
        for opener, address in routers.items():
            self._unknown_ms.pop(opener, None)
            if self._addresses.get(opener) != address:
                self._addresses[opener] = address
                self._queue(opener).reach(partial(self._connect, address))

    def opened(self, room: RoomId, request: Request, opener: Opener = NO_OPENER) -> None:
        """Remember the opener of a new room, and the trace context of its request, if it has one. Later lines
        of the room go to that opener, and become events of that trace."""
        self._openers[room] = opener
        self._spans.begin(room, request.request_id, request.trace)

    def adopted(self, room: RoomId, opener: Opener) -> None:
        """Send the later lines of a room to the router that has adopted it."""
        self._openers[room] = opener

    def failed(self, room: RoomId, cause: Cause) -> None:
        """Report the cause of a failed room to its timeline, to the log and to its trace. The timeline gets
        no line if the room has not failed (`is_attempt`)."""
        if REASONS[cause.reason].is_attempt:
            self.report(room, Moment.FAILED, f"{cause.reason.value}: {cause.text}")
            log.info("room failed", room=room, reason=cause.reason.value, cause=cause.text)
        elif cause.reason is Reason.LOCAL:
            log.debug("prompt left to decode", room=room, cause=cause.text)
        else:
            log.debug("room ended without a failure", room=room, reason=cause.reason.value, cause=cause.text)
        self._spans.fail(room, cause)

    def report(self, room: RoomId, name: Moment, detail: str = "") -> None:
        """Add a timeline line about an action of the whole worker, which is the same on all its ranks."""
        self._spans.event(room, name, detail)
        self._add(room, name, detail, retired=False)

    def report_of_rank(self, room: RoomId, name: Moment, detail: str = "") -> None:
        """Add a timeline line about an observation or a vote of this rank alone."""
        self.report(room, name, detail)

    def retired(self, room: RoomId, detail: str = "") -> None:
        self._spans.event(room, Moment.RETIRED, detail)
        self._spans.end(room)
        self._add(room, Moment.RETIRED, detail, retired=True)
        self._openers.pop(room, None)

    async def run(self) -> None:
        """Send batches of timeline lines until cancelled. A bootstrap that does not answer holds up no
        other."""
        sending: dict[ReportQueue, asyncio.Task[None]] = {}
        try:
            while True:
                self._changed.clear()
                self._drop_unknown()
                queues = list(self._queues.values())
                for queue in [each for each in sending if each not in queues]:
                    sending.pop(queue).cancel()
                for queue in [each for each in queues if each not in sending]:
                    sending[queue] = asyncio.create_task(queue.run())
                await self._wait(sending.values())
        finally:
            for task in sending.values():
                task.cancel()
            await asyncio.gather(*sending.values(), return_exceptions=True)

    async def flush(self) -> None:
        """Send the buffered timeline lines. They stay buffered if their bootstrap cannot be reached, and are
        lost if it refuses them."""
        await asyncio.gather(*(queue.flush() for queue in list(self._queues.values())))

    async def _wait(self, sending: Collection[asyncio.Task[None]]) -> None:
        """Wait until bootstraps have come or gone, or LOOK_S seconds. Raises the error of a task in
        `sending`."""
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({changed, *sending}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        for task in sending:
            if task.done():
                task.result()

    def _add(self, room: RoomId, name: Moment, detail: str, *, retired: bool) -> None:
        event = rooms_pb2.RoomEvent(
            wall_ms=self._clock.wall_ms(),
            source=self._source,
            name=name,
            detail=detail[:DETAIL_CHARS_MAX],
            host_us=self._clock.host_us(),
        ).SerializeToString()
        queues = self._queues_of(self._openers.get(room, NO_OPENER))
        for queue in queues:
            queue.add(ReportLine(room, event, retired))
        if not queues:
            self._drop(1)

    def _queues_of(self, opener: Opener) -> Sequence[ReportQueue]:
        """Return the queues for the lines of an opener's rooms. A room without an opener is reported to each
        bootstrap, and those that did not open it ignore its lines."""
        if opener in self._queues:
            return (self._queues[opener],)
        if opener == NO_OPENER and self._addresses:
            return [self._queues[each] for each in self._addresses]
        if opener in self._gone or len(self._unknown_ms) >= UNKNOWN_MAX:
            return ()
        self._unknown_ms[opener] = self._clock.now_ms()
        return (self._queue(opener),)

    def _queue(self, opener: Opener) -> ReportQueue:
        if opener not in self._queues:
            self._queues[opener] = ReportQueue(partial(self._request, opener), self._drop)
            self._changed.set()
        return self._queues[opener]

    def _request(self, opener: Opener, batch: Sequence[ReportLine]) -> rooms_pb2.ReportRoomsRequest:
        request = rooms_pb2.ReportRoomsRequest(
            incarnation=self._incarnation,
            rank=self._rank,
            credential=self._credential,
            load=self.load(opener) if any(line.retired for line in batch) else None,
        )
        for line in batch:
            request.reports.add(room=line.room, event=line.event, retired=line.retired)
        return request

    def _drop(self, lines: int) -> None:
        self.dropped += lines

    def _drop_unknown(self) -> None:
        """Drop lines for bootstraps whose address has not become known in time."""
        late_ms = self._clock.now_ms() - UNKNOWN_MS
        for opener in [each for each, since_ms in self._unknown_ms.items() if since_ms <= late_ms]:
            self._forget(opener)

    def _forget(self, opener: Opener) -> None:
        self._queues.pop(opener).drop_all()
        self._unknown_ms.pop(opener, None)
        self._addresses.pop(opener, None)
        self._changed.set()


class RankReporter(Reporter):
    """Reporter of a rank that does not lead. It reports only this rank's observations and votes."""

    def __init__(
        self,
        connect: Callable[[str], grpc.aio.Channel],
        rank: int,
        clock: Clock,
        only_address: str | None = None,
    ) -> None:
        """Make a reporter. `only_address`: the only entry of this rank's own `--bootstrap`, or None if it has
        several. If the leader knows one address only, this rank reaches the bootstrap at its own."""
        super().__init__(connect, Incarnation(0), f"rank {rank}", clock)
        self._rank = rank
        self._only_address = only_address

    def use(
        self, routers: Mapping[Opener, str], gone: Collection[Opener] = (), *, is_only_one: bool = False
    ) -> None:
        if is_only_one and self._only_address is not None:
            routers = dict.fromkeys(routers, self._only_address)
        super().use(routers, gone)

    def led_by(self, leader: Incarnation, credential: bytes) -> None:
        """Set the worker's incarnation and the credential of its ranks. Must be called before the first line
        is sent."""
        self._incarnation = leader
        self._credential = credential

    def opened(self, room: RoomId, request: Request, opener: Opener = NO_OPENER) -> None:  # noqa: ARG002
        self._openers[room] = opener

    def failed(self, room: RoomId, cause: Cause) -> None: ...

    def report(self, room: RoomId, name: Moment, detail: str = "") -> None: ...

    def report_of_rank(self, room: RoomId, name: Moment, detail: str = "") -> None:
        super().report(room, name, detail)

    def retired(self, room: RoomId, detail: str = "") -> None:  # noqa: ARG002
        self._openers.pop(room, None)


def wish_text(room: Room, wish: Vote, now_ms: int) -> str:
    """Return the text by which a room's timeline reports this rank's vote about the room."""
    ending = room.ending(now_ms)
    if wish is Vote.ABORT and ending is not None:
        return f"to end it while {room.phase.value}: {ending.reason.value}: {ending.text}"
    return f"to go on from {room.phase.value}; another rank does not yet"
