"""gRPC service of a worker's leader that streams the log of its prefix cache to routers.

Each router calls each worker. So the worker holds no state for a router beside the open call, and a router
that starts anew has the whole cache with its first messages.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Final

import grpc

from baton.ids import Incarnation
from baton.pages.kv_event_log import KvEventLog, KvEvents, KvSnapshotPart
from baton.rooms.errors import NoCapacity
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.errors import WrongIncarnation, errors_as_status
from baton.wire.load_messages import kv_log_to_wire

SERVICE: Final = "baton.v1.KvEventService"
GATHER_S: Final = 0.05
"""Time in which events gather before they are sent together, in seconds."""
REPEAT_S: Final = 10.0
"""Time after which an idle log sends its number and digest again, in seconds."""
READERS_MAX: Final = 64
"""Most calls at a time. Each router makes one."""


class KvEventService(workers_pb2_grpc.KvEventServiceServicer):
    def __init__(self, incarnation: Incarnation, log: KvEventLog) -> None:
        self._incarnation = incarnation
        self._log = log

    async def WatchKvEvents(
        self, request: workers_pb2.WatchKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[workers_pb2.KvLogMessage]:
        async with errors_as_status(context):
            if request.incarnation != self._incarnation:
                raise WrongIncarnation(f"this is incarnation {self._incarnation}, not {request.incarnation}")
            if len(self._log.on_event) >= READERS_MAX:
                raise NoCapacity(f"{READERS_MAX} readers follow this log already")
            changed = asyncio.Event()
            self._log.on_event.add(changed.set)
            number = request.after if request.HasField("after") else None
            try:
                while True:
                    changed.clear()
                    for message in self._next(number):
                        number = message.last if isinstance(message, KvEvents) else message.number
                        yield kv_log_to_wire(message)
                    if number != self._log.number:
                        continue  # more was logged than fits a batch, or while the batch was sent
                    with suppress(TimeoutError):
                        async with asyncio.timeout(REPEAT_S):
                            await changed.wait()
                            await asyncio.sleep(GATHER_S)
            finally:
                self._log.on_event.discard(changed.set)

    def _next(self, number: int | None) -> Iterable[KvEvents | KvSnapshotPart]:
        """Return what a reader needs that has the events up to `number`, None for no event."""
        events = None if number is None else self._log.after(number)
        return self._log.snapshot() if events is None else (events,)
