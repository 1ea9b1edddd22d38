"""Timeline lines that wait for one bootstrap, and the task that sends them in batches."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import grpc

from baton.ids import RoomId
from baton.runtime.logging import Log
from baton.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc
from baton.wire.channel import UNARY_S
from baton.wire.errors import remote_error
from baton.wire.message_limits import REPORTS_MAX

log = Log(__name__)

LINES_MAX: Final = 8192
"""Most lines that wait for one bootstrap. Further ones are dropped, unless they say that a room is
retired."""
PAUSE_S: Final = 0.02
RETRY_S: Final = 0.5


class ReportLine(NamedTuple):
    """Line of a room's timeline that is buffered until it is sent to the bootstrap."""

    room: RoomId
    event: bytes
    """Protobuf `RoomEvent` of the line, serialised. The bootstrap stores these bytes without parsing them."""
    retired: bool
    """Whether the line says that the room is retired. It is this worker's last line about the room."""


class ReportQueue:
    """Queue of lines for one bootstrap. `add` is cheap and never waits."""

    def __init__(
        self,
        make_request: Callable[[Sequence[ReportLine]], rooms_pb2.ReportRoomsRequest],
        on_drop: Callable[[int], None],
    ) -> None:
        """Make an empty queue without an address.

        `make_request`: makes the message with a batch of lines. `on_drop`: called with a number of lines that
        the bootstrap will not get.
        """
        self._make_request = make_request
        self._on_drop = on_drop
        self._connect: Callable[[], grpc.aio.Channel] | None = None
        self._stub: rooms_pb2_grpc.RoomServiceStub | None = None
        self.pending: list[ReportLine] = []
        self._wake = asyncio.Event()
        self._sending = asyncio.Lock()

    @property
    def has_address(self) -> bool:
        return self._stub is not None

    def reach(self, connect: Callable[[], grpc.aio.Channel]) -> None:
        """Send to the bootstrap of a channel from now on. `connect`: returns the channel, and is called again
        after each attempt without an answer, so that the next one may use another channel."""
        self._connect = connect
        self._stub = rooms_pb2_grpc.RoomServiceStub(connect())
        self._wake.set()

    def add(self, line: ReportLine) -> None:
        if len(self.pending) >= LINES_MAX and not line.retired:
            self._on_drop(1)
            return
        self.pending.append(line)
        self._wake.set()

    def drop_all(self) -> None:
        """Drop all lines, because their bootstrap is gone."""
        self._on_drop(len(self.pending))
        self.pending.clear()

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
            while self.pending and self._stub is not None:
                batch = self.pending[:REPORTS_MAX]
                request = self._make_request(batch)
                try:
                    await self._stub.ReportRooms(request, timeout=UNARY_S)
                except grpc.aio.AioRpcError as error:
                    remote = remote_error(error)
                    if remote.unreachable:
                        log.debug("reports kept for later", cause=str(remote))
                        self._wake.set()
                        if self._connect is not None:
                            self.reach(self._connect)
                        await asyncio.sleep(RETRY_S)
                        return
                    self._on_drop(len(batch))
                    log.warning("reports refused", reports=len(batch), cause=str(remote))
                del self.pending[: len(batch)]
