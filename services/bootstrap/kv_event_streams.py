"""Streams of the workers' KV event logs to this router, one for each worker with a prefix cache.

A stream that breaks is opened again, and goes on after the last event. A log with a gap is read from a
snapshot.
"""

import asyncio
from typing import Final

import grpc

from baton.fleet.registry import Registry
from baton.ids import Incarnation
from baton.rooms.worker_facts import WorkerFacts
from baton.runtime.logging import Log
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.channel import Channels
from baton.wire.errors import remote_error
from baton.wire.load_messages import kv_log_from_wire
from baton.wire.malformed import Malformed
from baton.wire.service_role import ServiceRole

log = Log(__name__)

PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 5.0
"""Longest pause before a broken stream is opened again, in seconds. The pause begins at PAUSE_S and doubles
each time."""


class KvEventStreams:
    """Streams of KV events, by incarnation of the worker. Used from one event loop."""

    def __init__(self, channels: Channels, registry: Registry) -> None:
        self._channels = channels
        self._registry = registry
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def follow(self, facts: WorkerFacts) -> None:
        """Begin to read the log of a registered worker, if it has a prefix cache and is not read yet."""
        if facts.keeps_prefixes and facts.incarnation not in self._tasks:
            self._tasks[facts.incarnation] = asyncio.create_task(self._read_on(facts))

    def drop(self, incarnation: Incarnation) -> None:
        """Stop reading the log of a worker that is gone."""
        task = self._tasks.pop(incarnation, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for incarnation in list(self._tasks):
            self.drop(incarnation)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_on(self, facts: WorkerFacts) -> None:
        """Read a worker's log over one stream after another, while the worker holds a lease."""
        pause_s = PAUSE_S
        while self._registry.holds_lease(facts.incarnation):
            try:
                if await self._read(facts):
                    pause_s = PAUSE_S
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    log.info("a worker tells nothing of its prefix cache", worker=facts.name)
                    return
                log.debug("a KV event stream broke", worker=facts.name, cause=str(remote_error(error)))
            except Malformed as error:
                log.warning("a KV event log was not read", worker=facts.name, cause=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _read(self, facts: WorkerFacts) -> bool:
        """Read a worker's log until its stream ends, or a gap shows that a snapshot is needed. Return whether
        the log was whole at any time. Raises AioRpcError and Malformed."""
        kv_log = self._registry.worker(facts.incarnation).kv_log
        request = workers_pb2.WatchKvEventsRequest(
            incarnation=facts.incarnation, after=kv_log.number if kv_log.is_current else None
        )
        channel = self._channels.to(facts.address, ServiceRole.of(facts.side), facts.incarnation)
        was_current = False
        async for message in workers_pb2_grpc.KvEventServiceStub(channel).WatchKvEvents(request):
            is_current = self._registry.read_kv_log(facts.incarnation, kv_log_from_wire(message))
            if was_current and not is_current:
                log.warning("a KV event log has a gap, or differs: it is read anew", worker=facts.name)
                return True
            was_current = was_current or is_current
        return was_current
