"""Timeline lines of a worker, sent to the bootstrap in parallel with the turns.

Lines go into a bounded buffer and leave in batches. When the buffer is full, lines are dropped and counted.
The news that a room is retired is never dropped, because the bootstrap waits for it. The leader reports the
actions that all ranks take together. Each rank reports its own evidence and votes.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import grpc

from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Vote
from baton.rooms.reasons import REASONS
from baton.rooms.request import Request
from baton.rooms.room import Room
from baton.rooms.timeline import Moment
from baton.runtime.clock import Clock
from baton.runtime.logging import Log
from baton.telemetry.room_spans import RoomSpans
from baton.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc
from baton.wire.channel import UNARY_S
from baton.wire.errors import remote_error
from baton.wire.message_limits import REPORTS_MAX

log = Log(__name__)

LINES_MAX: Final = 8192
PAUSE_S: Final = 0.02
RETRY_S: Final = 0.5
DETAIL_CHARS_MAX: Final = 512


class _Line(NamedTuple):
    """Line of a room's timeline that is buffered until it is sent to the bootstrap."""

    room: RoomId
    event: bytes
    """Protobuf `RoomEvent` of the line, serialised. The bootstrap stores these bytes without parsing them."""
    retired: bool
    """Whether the line says that the room is retired. It is this worker's last line about the room."""


class Reporter:
    """Buffer of a worker's timeline lines, and the task that sends them. `report` and `retired` are cheap and
    never wait."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        incarnation: Incarnation,
        source: str,
        clock: Clock,
        spans: RoomSpans | None = None,
        on_unreachable: Callable[[], None] = lambda: None,
        credential: bytes = b"",
    ) -> None:
        """Make an empty reporter.

        `spans`: receives the lines of traced rooms as well. `on_unreachable`: called after each attempt
        without an answer, so that the next one may use another channel. `credential`: proof that it reports
        for its worker.
        """
        self._clock = clock
        self._on_unreachable = on_unreachable
        self._spans = RoomSpans() if spans is None else spans
        self._stub = rooms_pb2_grpc.RoomServiceStub(channel)
        self._incarnation = incarnation
        self._credential = credential
        self._rank = 0
        self._source = source
        self.pending: list[_Line] = []
        self._wake = asyncio.Event()
        self._sending = asyncio.Lock()
        self.load: Callable[[], rooms_pb2.WorkerLoad | None] = lambda: None
        """Function that returns the worker's load, which is sent with batches in which rooms ended. It
        returns None if the bootstrap gets the load in another way."""
        self.dropped = 0
        """Number of timeline lines since the start that were lost before the bootstrap had them."""

    def reach(self, channel: grpc.aio.Channel) -> None:
        """Use this channel to the bootstrap for all later calls, in place of the former one."""
        self._stub = rooms_pb2_grpc.RoomServiceStub(channel)

    def opened(self, room: RoomId, request: Request) -> None:
        """Remember the trace context of a new room's request, if it has one. Later timeline lines of the room
        become events of that trace."""
        self._spans.begin(room, request.request_id, request.trace)

    def failed(self, room: RoomId, cause: Cause) -> None:
        """Report the cause of a failed room to its timeline, to the log and to its trace. The timeline gets
        no line if the room was retracted or its prompt left to decode."""
        if REASONS[cause.reason].is_attempt:
            self.report(room, Moment.FAILED, f"{cause.reason.value}: {cause.text}")
            log.info("room failed", room=room, reason=cause.reason.value, cause=cause.text)
        elif cause.reason is Reason.LOCAL:
            log.debug("prompt left to decode", room=room, cause=cause.text)
        else:
            log.debug("room retracted", room=room, cause=cause.text)
        self._spans.fail(room, cause)

    def report(self, room: RoomId, name: Moment, detail: str = "") -> None:
        """Add a timeline line about an action of the whole worker, which is the same on all its ranks."""
        self._spans.event(room, name, detail)
        if len(self.pending) >= LINES_MAX:
            self.dropped += 1
            return
        self._add(room, name, detail, retired=False)

    def report_of_rank(self, room: RoomId, name: Moment, detail: str = "") -> None:
        """Add a timeline line about an observation or a vote of this rank alone."""
        self.report(room, name, detail)

    def retired(self, room: RoomId, detail: str = "") -> None:
        self._spans.event(room, Moment.RETIRED, detail)
        self._spans.end(room)
        self._add(room, Moment.RETIRED, detail, retired=True)

    async def run(self) -> None:
        """Send batches of timeline lines until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(PAUSE_S)
            await self.flush()

    async def flush(self) -> None:
        """Send the buffered timeline lines. They stay buffered if the bootstrap cannot be reached, and are
        lost if it refuses them."""
        async with self._sending:
            self._wake.clear()
            while self.pending:
                batch = self.pending[:REPORTS_MAX]
                request = rooms_pb2.ReportRoomsRequest(
                    incarnation=self._incarnation,
                    rank=self._rank,
                    credential=self._credential,
                    load=self.load() if any(line.retired for line in batch) else None,
                )
                for line in batch:
                    request.reports.add(room=line.room, event=line.event, retired=line.retired)
                try:
                    await self._stub.ReportRooms(request, timeout=UNARY_S)
                except grpc.aio.AioRpcError as error:
                    remote = remote_error(error)
                    if remote.unreachable:
                        log.debug("reports kept for later", cause=str(remote))
                        self._wake.set()
                        self._on_unreachable()
                        await asyncio.sleep(RETRY_S)
                        return
                    self.dropped += len(batch)
                    log.warning("reports refused", reports=len(batch), cause=str(remote))
                del self.pending[: len(batch)]

    def _add(self, room: RoomId, name: Moment, detail: str, *, retired: bool) -> None:
        event = rooms_pb2.RoomEvent(
            wall_ms=self._clock.wall_ms(),
            source=self._source,
            name=name,
            detail=detail[:DETAIL_CHARS_MAX],
            host_us=self._clock.host_us(),
        ).SerializeToString()
        self.pending.append(_Line(room, event, retired))
        self._wake.set()


class RankReporter(Reporter):
    """Reporter of a rank that does not lead. It reports only this rank's observations and votes."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        rank: int,
        clock: Clock,
        on_unreachable: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(channel, Incarnation(0), f"rank {rank}", clock, on_unreachable=on_unreachable)
        self._rank = rank

    def led_by(self, leader: Incarnation, credential: bytes) -> None:
        """Set the worker's incarnation and the credential of its ranks. Must be called before the first line
        is sent."""
        self._incarnation = leader
        self._credential = credential

    def opened(self, room: RoomId, request: Request) -> None: ...

    def failed(self, room: RoomId, cause: Cause) -> None: ...

    def report(self, room: RoomId, name: Moment, detail: str = "") -> None: ...

    def report_of_rank(self, room: RoomId, name: Moment, detail: str = "") -> None:
        super().report(room, name, detail)

    def retired(self, room: RoomId, detail: str = "") -> None: ...


def wish_text(room: Room, wish: Vote, now_ms: int) -> str:
    """Return the text by which a room's timeline reports this rank's vote about the room."""
    ending = room.ending(now_ms)
    if wish is Vote.ABORT and ending is not None:
        return f"to end it while {room.phase.value}: {ending.reason.value}: {ending.text}"
    return f"to go on from {room.phase.value}; another rank does not yet"
