"""How do workers hear that a room is over, and when is the way to them closed?

Each is told in a call of its own (`terminal-reaches-peer`), whose end nobody waits for.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc

from services.rooms.errors import Cause
from services.rooms.ids import Incarnation, RoomId
from services.rooms.phases import Side
from services.rooms.registry import Registry, RoomEntry, WorkerFacts
from services.runtime.logging import Log
from services.runtime.party import Party
from services.wire.baton.v1 import inference_pb2, inference_pb2_grpc
from services.wire.channel import Channels
from services.wire.conversions import cause_to_wire

log = Log(__name__)

CANCEL_S: Final = 2.0
CANCEL_TRIES: Final = 3


class Calls:
    """Those that are under way. Used from one event loop."""

    def __init__(
        self, registry: Registry, channels: Channels, absent: Callable[[RoomId, Side], None]
    ) -> None:
        """`absent`: told where a worker never got the room."""
        self._registry = registry
        self._channels = channels
        self._absent = absent
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, entry: RoomEntry, cause: Cause) -> None:
        """Tell the workers that still hold the room, and are there, why it is over."""
        known = self._incarnations()
        for side in [each for each in Side if each in entry.waiting_for]:
            facts = entry.worker(side)
            if facts.incarnation in known:
                self._spawn(self._cancel(facts, entry.id, cause))

    def drop_channels(self) -> None:
        """Close the ways to workers that are gone and that no open room has."""
        gone = self._channels.incarnations() - self._incarnations()
        for entry in self._registry.open_rooms() if gone else ():
            gone -= {entry.prefill.incarnation, entry.decode.incarnation}
        for incarnation in gone:
            self._spawn(self._channels.drop(incarnation))

    async def finish(self) -> None:
        """Wait for those that are under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- inside

    async def _cancel(self, facts: WorkerFacts, room: RoomId, cause: Cause) -> None:
        """Best effort: a worker that cannot be told loses its lease, or its stream, soon."""
        request = inference_pb2.CancelRequest(
            room=room, incarnation=facts.incarnation, cause=cause_to_wire(cause)
        )
        channel = self._channels.to(facts.address, Party.of(facts.side), facts.incarnation)
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
                    self._absent(room, facts.side)
                return

    def _incarnations(self) -> set[Incarnation]:
        return {worker.facts.incarnation for worker in self._registry.workers()}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """It is kept alive, and its failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background call failed", error=task.exception())
