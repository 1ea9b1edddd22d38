"""Who starts the processes, sees them end and starts them again?

A worker's name is held by one incarnation at a time: the next one is started only after every process of the
last one has ended. The exit is reported to the bootstrap, or not.
"""

import asyncio
import random
from typing import Final

import grpc

from services.rooms.phases import Side
from services.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from tests.sim.bootstrap import SimulatedBootstrap
from tests.sim.calls import Channel
from tests.sim.loop import SimulatedProcess
from tests.sim.rank import WorkerShape, World
from tests.sim.worker import BOOTSTRAP, SimulatedWorker

REPORT_TRIES: Final = 3


class Platform:
    def __init__(self, world: World, seed: str) -> None:
        self._world = world
        self._random = random.Random(f"{seed}/platform")
        self._process = SimulatedProcess(world.loop, "platform", "platform")
        self._pids = 1_000
        self.workers: dict[str, SimulatedWorker] = {}
        """By name, the present incarnation, which may be over."""
        shape, self._stack = world.shape, dict[str, tuple[Side, WorkerShape]]()
        for number, topology in enumerate(shape.prefills):
            made = WorkerShape.of(topology, world.whole, shape.prefill_page_tokens, shape.pages)
            self._stack[f"prefill-{number}"] = (Side.PREFILL, made)
        for number, topology in enumerate(shape.decodes):
            made = WorkerShape.of(topology, world.whole, shape.decode_page_tokens, shape.pages)
            self._stack[f"decode-{number}"] = (Side.DECODE, made)
        self.everyone: list[SimulatedWorker] = []
        """Every incarnation that ever was."""
        self.bootstrap = SimulatedBootstrap(world)
        self.bootstraps = [self.bootstrap]
        self.bootstrap_up = asyncio.Event()

    def start(self) -> None:
        self.start_bootstrap()
        for name in self._stack:
            self._start_worker(name)

    def start_bootstrap(self) -> None:
        if self.bootstrap.process.dead:
            self.bootstrap = SimulatedBootstrap(self._world)
            self.bootstraps.append(self.bootstrap)
        self.bootstrap.start()
        self.bootstrap_up.set()

    def crash_bootstrap(self, down_s: float) -> None:
        self.bootstrap_up.clear()
        self.bootstrap.crash()
        self._world.loop.call_later(down_s, self.start_bootstrap)

    def running(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers.values() if not worker.over]

    def all_ready(self) -> bool:
        """Every worker holds a lease and has proven itself."""
        states = {w.facts.incarnation: w.state.value for w in self.bootstrap.registry.workers()}
        return all(not w.over and states.get(w.incarnation) == "ready" for w in self.workers.values())

    def _start_worker(self, name: str) -> None:
        self._pids += 1
        worker = SimulatedWorker(self._world, *self._stack[name], name, self._pids, self._on_end)
        self.workers[name] = worker
        self.everyone.append(worker)
        self._world.trace.note(self._world.loop.time(), name, "started", 0, f"pid {worker.pid}")
        worker.start()

    def _on_end(self, worker: SimulatedWorker, why: str) -> None:
        self._world.trace.note(self._world.loop.time(), worker.name, "ended", 0, why)
        if self._random.random() < self._world.shape.troubles.told_share:
            self._process.spawn(self._report(worker, self._random.uniform(0.0, 0.2)))
        self._world.loop.call_later(self._random.uniform(0.05, 2.5), self._start_worker, worker.name)

    async def _report(self, worker: SimulatedWorker, after_s: float) -> None:
        await asyncio.sleep(after_s)
        stub = workers_pb2_grpc.WorkerRegistryStub(Channel(self._world.network, BOOTSTRAP))
        request = workers_pb2.ReportExitRequest(name=worker.name, pid=worker.pid)
        for _ in range(REPORT_TRIES):
            try:
                await stub.ReportExit(request, timeout=1.0)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.5)
            else:
                return
