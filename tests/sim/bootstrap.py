"""One incarnation of the bootstrap, wired of the product's own parts as `wiring.py` wires them."""

import asyncio
from collections import Counter
from functools import partial
from typing import Any, Final

from grpc_health.v1 import health, health_pb2_grpc
from prometheus_client import CollectorRegistry

from baton.bootstrap.accept_probe import AcceptProbe
from baton.bootstrap.bootstrap_services import RoomService, WorkerRegistry
from baton.bootstrap.canary import OUTPUT_TOKENS, REQUEST_ID, Canary, canary_prompt
from baton.bootstrap.metrics import BootstrapMetrics, Loss, RegistryCollector
from baton.bootstrap.room_backend import RoomBackend
from baton.bootstrap.room_controller import RoomController
from baton.fleet.need import Need
from baton.fleet.placement import Pair
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.request import Request
from baton.rooms.worker_load import WorkerLoad
from baton.wire.baton.v1 import rooms_pb2_grpc, workers_pb2_grpc
from baton.wire.channel import Channels
from baton.wire.liveness import LivenessProbe
from baton.wire.service_role import ServiceRole
from tests.sim.calls import Channel, SimulatedServer
from tests.sim.checks import may_be_lost
from tests.sim.clock import SkewedClock
from tests.sim.engine import CONTEXT, WHOLE
from tests.sim.loop import SimulatedProcess
from tests.sim.rank import World, bootstrap_name

LEASE_MS: Final = 1_000
QUEUE_MS: Final = 8_000
REQUEST_S: Final = 20.0
ROOMS_MAX: Final = 2**32
"""More rooms than a bootstrap opens in a run."""
CANARY: Final = Request(REQUEST_ID, canary_prompt(RoomId(0)), OUTPUT_TOKENS, ignore_eos=True)
"""Canary request that the product makes for a model without recommended settings (checked in
`test_sim.py`)."""
LIVE: Final = frozenset({RoomPhase.OPEN, RoomPhase.STREAMING})


class WatchedRegistry(Registry):
    """The bootstrap's registry, with the check that a worker which refused a room for want of a place gets no
    other before its next report (`full-is-no-failure`). So a request gets at most one refusal of a worker
    between two of its reports."""

    tell_world: World

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.full: set[Incarnation] = set()
        """Workers that have refused a room for want of a place since their last report."""
        self._numbers = Counter[Incarnation]()
        """Number of the last report of each worker."""

    def update_load(self, incarnation: Incarnation, load: WorkerLoad, now_ms: int) -> bool:
        if load.number > self._numbers[incarnation]:
            self._numbers[incarnation] = load.number
            self.full.discard(incarnation)
        return super().update_load(incarnation, load, now_ms)

    def open_room(self, request_id: str, pair: Pair, need: Need, now_ms: int, **more: Any) -> RoomEntry:
        entry = super().open_room(request_id, pair, need, now_ms, **more)
        for worker in entry.workers:
            if worker.incarnation in self.full and not entry.canary:
                text = (
                    f"room {entry.id} is placed on {worker.name}, which was full and has not reported since"
                )
                trace, now_s = self.tell_world.trace, self.tell_world.loop.time()
                trace.violate(now_s, "full-is-no-failure", text, entry.id)
        return entry


class WatchedRooms(RoomController):
    """The bootstrap's rooms, with checks that none waits for a timer where news exists
    (`terminal-reaches-peer`) and that no live worker that reports is lost (`live-is-not-lost`)."""

    tell_world: World
    watched: WatchedRegistry

    def lose(self, incarnation: Incarnation, why: str, *, proof: str | None, how: Loss = Loss.SILENT) -> None:
        world = self.tell_world
        by_itself = proof == Loss.LEFT.value or how is Loss.STALLED
        if self.registry.holds_lease(incarnation) and not by_itself and not may_be_lost(world, incarnation):
            text = f"{world.workers[incarnation].name} lives and is lost: {why}"
            world.trace.violate(world.loop.time(), "live-is-not-lost", text)
        super().lose(incarnation, why, proof=proof, how=how)

    def fail(self, room: RoomId, cause: Cause) -> None:
        entry, departed = self.registry.get(room), self.registry.departed()
        late = [side.value for side in entry.sides if entry.worker(side).incarnation in departed]
        if entry.phase in LIVE and cause.reason is Reason.DEADLINE and late:
            trace, now_s = self.tell_world.trace, self.tell_world.loop.time()
            text = f"room {room} ends by its deadline ({cause.text}): its {late} was known to be gone"
            trace.violate(now_s, "terminal-reaches-peer", text, room)
        if entry.phase in LIVE and cause.reason is Reason.WORKER_FULL:
            refused = (entry.worker(side) for side in entry.sides if cause.text.startswith(side.value))
            self.watched.full.update(worker.incarnation for worker in refused)
        super().fail(room, cause)


class SimulatedBootstrap:
    def __init__(self, world: World, number: int = 0) -> None:
        self._world = world
        self.number = number
        self.name = bootstrap_name(number)
        address = world.bootstraps[number]
        self.process = SimulatedProcess(world.loop, self.name, self.name)
        self.clock = SkewedClock(world.loop)
        self._channels = Channels(lambda address, _: Channel(world.network, address))
        self.metrics = CollectorRegistry()
        metrics = BootstrapMetrics(self.metrics)
        self._first_room = world.rng.getrandbits(61) | 1
        self.registry = WatchedRegistry(
            model=WHOLE.model,
            first_room=self._first_room,
            lease_ms=LEASE_MS,
            done_max=1024,
            failed_max=1024,
        )
        self.rooms = WatchedRooms(
            self.registry,
            self.clock,
            self._channels,
            metrics,
            world.shape.queue,
            QUEUE_MS,
            presence=LivenessProbe(self._channels, partial(world.network.is_listening, self.process.host)),
        )
        self.rooms.tell_world = self.registry.tell_world = world
        self.rooms.watched = self.registry
        queued = self.rooms.admission.queued_by_class, self.rooms.admission.queued_by_side
        self.metrics.register(RegistryCollector(self.registry, *queued))
        self.backend = RoomBackend(self.rooms, CONTEXT, REQUEST_S)
        self.canary = Canary(self.rooms, self.backend, CANARY)
        self.server = SimulatedServer(world.network, self.process, address)
        self._hearing = AcceptProbe(
            lambda: self._channels.to(address, ServiceRole.BOOTSTRAP),
            lambda: self.server.accepted,
            self.clock,
        )

    def start(self) -> None:
        workers_pb2_grpc.add_WorkerRegistryServicer_to_server(WorkerRegistry(self.rooms), self.server)
        rooms_pb2_grpc.add_RoomServiceServicer_to_server(RoomService(self.rooms), self.server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self.server)
        self.server.open()
        time = self.rooms.keep_time(self._hearing.accepted_until_ms)
        for work in (self._hearing.run(), time, self.canary.run()):
            task = self.process.spawn(work)
            task.add_done_callback(self._ended)

    def opened(self) -> int:
        """Rooms so far. Their ids go on by one, and the newest is known still. Adopted rooms have other
        ids."""
        since = (entry.id - self._first_room for entry in self.registry.rooms())
        return 1 + max((each for each in since if 0 <= each < ROOMS_MAX), default=-1)

    def crash(self) -> None:
        self.process.kill()
        self._world.network.died(self.process)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not self.process.dead:
            self._world.trace.violate(
                self._world.loop.time(), "moves-listed", f"a task of the bootstrap ended: {task!r}"
            )
