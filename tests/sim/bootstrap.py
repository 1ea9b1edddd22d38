"""One incarnation of the bootstrap, wired of the product's own parts as `wiring.py` wires them."""

import asyncio
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry

from services.bootstrap.attempts import RoomBackend
from services.bootstrap.canary import Canary, canary_request
from services.bootstrap.metrics import BootstrapMetrics, RegistryCollector
from services.bootstrap.rooms import Rooms
from services.bootstrap.rpc import RoomService, WorkerRegistry
from services.rooms.errors import Cause, Reason
from services.rooms.ids import RoomId
from services.rooms.phases import Side
from services.rooms.registry import Registry, RoomPhase
from services.wire.baton.v1 import rooms_pb2_grpc, workers_pb2_grpc
from services.wire.channel import Channels
from services.wire.presence import PresenceAsker
from tests.sim.calls import Channel, Server
from tests.sim.clock import SkewedClock
from tests.sim.engine import CONTEXT, WHOLE, Defaults
from tests.sim.loop import Process
from tests.sim.rank import World
from tests.sim.worker import BOOTSTRAP

LEASE_MS: Final = 1_000
QUEUE_MS: Final = 8_000
REQUEST_S: Final = 20.0
LIVE: Final = frozenset({RoomPhase.OPEN, RoomPhase.STREAMING})


class WatchedRooms(Rooms):
    """Rooms do not wait for a timer where news exists (`terminal-reaches-peer`)."""

    tell_world: World

    def fail(self, room: RoomId, cause: Cause) -> None:
        entry, departed = self.registry.get(room), self.registry.departed()
        late = [side.value for side in Side if entry.worker(side).incarnation in departed]
        if entry.phase in LIVE and cause.reason is Reason.DEADLINE and late:
            trace, now_s = self.tell_world.trace, self.tell_world.loop.time()
            text = f"room {room} ends by its deadline ({cause.text}): its {late} was known to be gone"
            trace.violate(now_s, "terminal-reaches-peer", text, room)
        super().fail(room, cause)


class Bootstrap:
    def __init__(self, world: World) -> None:
        self._world = world
        self.process = Process(world.loop, "bootstrap", "bootstrap")
        self.clock = SkewedClock(world.loop)
        self._channels = Channels(lambda address, _: Channel(world.network, address))
        self.metrics = CollectorRegistry()
        metrics = BootstrapMetrics(self.metrics)
        self._first_room = world.rng.getrandbits(61) | 1
        self.registry = Registry(
            model=WHOLE.model,
            first_room=self._first_room,
            lease_ms=LEASE_MS,
            kept=1024,
            failed_kept=1024,
        )
        self.rooms = WatchedRooms(
            self.registry,
            self.clock,
            self._channels,
            metrics,
            world.shape.queue,
            QUEUE_MS,
            presence=PresenceAsker(self._channels, partial(world.network.is_listening, self.process.host)),
        )
        self.rooms.tell_world = world
        self.metrics.register(RegistryCollector(self.registry, self.rooms.admission.queued))
        self.backend = RoomBackend(self.rooms, CONTEXT, REQUEST_S)
        self.canary = Canary(self.rooms, self.backend, canary_request(Defaults(), CONTEXT))
        self._server = Server(world.network, self.process, BOOTSTRAP)

    def start(self) -> None:
        workers_pb2_grpc.add_WorkerRegistryServicer_to_server(WorkerRegistry(self.rooms), self._server)
        rooms_pb2_grpc.add_RoomServiceServicer_to_server(RoomService(self.rooms), self._server)
        self._server.open()
        for work in (self.rooms.keep_time(), self.canary.run()):
            task = self.process.spawn(work)
            task.add_done_callback(self._ended)

    def opened(self) -> int:
        """Rooms so far."""
        return self.registry._next_room - self._first_room

    def crash(self) -> None:
        self.process.kill()
        self._world.network.died(self.process)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not self.process.dead:
            self._world.trace.violate(
                self._world.loop.time(), "moves-listed", f"a task of the bootstrap ended: {task!r}"
            )
