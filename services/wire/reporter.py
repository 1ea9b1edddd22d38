"""How do a worker's lines of a room's timeline reach the bootstrap without costing a turn?

Events go into a bounded buffer and leave in batches. Timeline lines are dropped, and counted, when the
buffer is full; the news that a room is retired is never dropped, because the registry waits for it.
"""

import asyncio

import grpc

from services.rooms.ids import Incarnation, RoomId
from services.runtime.clock import Clock
from services.runtime.logging import Log
from services.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc
from services.wire.channel import UNARY_S
from services.wire.errors import remote_error

log = Log(__name__)

LINES_MAX = 8192
BATCH_MAX = 1024
PAUSE_S = 0.02
RETRY_S = 0.5
DETAIL_CHARS_MAX = 512


class Reporter:
    """Runs as one task. `note` and `retired` are cheap and never wait."""

    def __init__(
        self, channel: grpc.aio.Channel, incarnation: Incarnation, source: str, clock: Clock
    ) -> None:
        self._clock = clock
        self._stub = rooms_pb2_grpc.RoomServiceStub(channel)
        self._incarnation = incarnation
        self._source = source
        self._waiting: list[rooms_pb2.RoomReport] = []
        self._wake = asyncio.Event()
        self._sending = asyncio.Lock()
        self.dropped = 0
        """Lines that were lost, since start."""

    def note(self, room: RoomId, name: str, detail: str = "") -> None:
        if len(self._waiting) >= LINES_MAX:
            self.dropped += 1
            return
        self._add(room, name, detail, retired=False)

    def retired(self, room: RoomId, detail: str = "") -> None:
        self._add(room, "retired", detail, retired=True)

    async def run(self) -> None:
        """Send batches until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(PAUSE_S)
            await self.flush()

    async def flush(self) -> None:
        """Send what waits. A bootstrap that cannot be reached gets it later; what it refuses is lost."""
        async with self._sending:
            self._wake.clear()
            while self._waiting:
                batch = self._waiting[:BATCH_MAX]
                request = rooms_pb2.ReportRoomsRequest(incarnation=self._incarnation, reports=batch)
                try:
                    await self._stub.ReportRooms(request, timeout=UNARY_S)
                except grpc.aio.AioRpcError as error:
                    remote = remote_error(error)
                    if remote.unreachable:
                        log.debug("reports kept for later", cause=str(remote))
                        self._wake.set()
                        await asyncio.sleep(RETRY_S)
                        return
                    self.dropped += len(batch)
                    log.warning("reports refused", reports=len(batch), cause=str(remote))
                del self._waiting[: len(batch)]

    def _add(self, room: RoomId, name: str, detail: str, *, retired: bool) -> None:
        event = rooms_pb2.RoomEvent(
            wall_ms=self._clock.wall_ms(),
            source=self._source,
            name=name,
            detail=detail[:DETAIL_CHARS_MAX],
            host_us=self._clock.host_us(),
        )
        self._waiting.append(rooms_pb2.RoomReport(room=room, event=event, retired=retired))
        self._wake.set()


class SilentReporter(Reporter):
    """Of a rank that does not lead: the leader reports for its group."""

    def __init__(self) -> None:
        self.dropped = 0

    def note(self, room: RoomId, name: str, detail: str = "") -> None: ...

    def retired(self, room: RoomId, detail: str = "") -> None: ...
