"""Platform that starts processes, sees their ends and restarts them.

A worker's name is held by one incarnation at a time: the next one is started only after every process of the
last one has ended. The exit is reported to the bootstrap, or not.
"""

import asyncio
import random
from typing import Final

import grpc

from baton.rooms.phases import Side
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from tests.sim.bootstrap import SimulatedBootstrap
from tests.sim.calls import Channel
from tests.sim.loop import SimulatedProcess
from tests.sim.rank import WorkerShape, World
from tests.sim.worker import LEFT, SimulatedWorker

REPORT_TRIES: Final = 3


class Platform:
    def __init__(self, world: World, seed: str) -> None:
        self._world = world
        self._random = random.Random(f"{seed}/platform")
        self._process = SimulatedProcess(world.loop, "platform", "platform")
        self._pids = 1_000
        self.workers: dict[str, SimulatedWorker] = {}
        """The present incarnation of each worker by name. It may have ended."""
        shape, self._stack = world.shape, dict[str, tuple[Side, WorkerShape]]()
        for number, topology in enumerate(shape.prefills):
            made = WorkerShape.of(topology, world.whole, shape.prefill_page_tokens, shape.pages, shape.states)
            self._stack[f"prefill-{number}"] = (Side.PREFILL, made)
        for number, topology in enumerate(shape.decodes):
            made = WorkerShape.of(topology, world.whole, shape.decode_page_tokens, shape.pages, shape.states)
            self._stack[f"decode-{number}"] = (Side.DECODE, made)
        one_sided = (name for name in self._stack if int(name.split("-")[1]) >= shape.both)
        self._processes: list[tuple[str, ...]] = [(name,) for name in one_sided]
        """The names of the workers that are one process each."""
        self._processes += [(f"prefill-{number}", f"decode-{number}") for number in range(shape.both)]
        self.everyone: list[SimulatedWorker] = []
        """Every incarnation of a worker that ever existed."""
        self.present = [SimulatedBootstrap(world, number) for number in range(world.shape.bootstraps)]
        """The present incarnation of each bootstrap. It may have ended."""
        self.bootstraps = list(self.present)
        """Every incarnation of a bootstrap that ever existed."""
        self.crashed: set[int] = set()
        """Numbers of bootstraps that ever crashed."""
        self.bootstrap_up = asyncio.Event()
        self._ended: set[int] = set()
        """Processes, by their numbers."""

    def start(self) -> None:
        for number in range(len(self.present)):
            self.start_bootstrap(number)
        for names in sorted(self._processes, key=lambda names: list(self._stack).index(names[0])):
            self._start_process(names)

    @property
    def bootstrap(self) -> SimulatedBootstrap:
        """Return the first bootstrap."""
        return self.present[0]

    def living(self) -> list[SimulatedBootstrap]:
        """Return the bootstraps that run or are paused."""
        return [each for each in self.present if not each.process.dead]

    def start_bootstrap(self, number: int) -> None:
        if self.present[number].process.dead:
            self.present[number] = SimulatedBootstrap(self._world, number)
            self.bootstraps.append(self.present[number])
        self.present[number].start()
        self.bootstrap_up.set()

    def crash_bootstrap(self, down_s: float, number: int = 0) -> None:
        self.crashed.add(number)
        self.present[number].crash()
        if not self.living():
            self.bootstrap_up.clear()
        self._world.loop.call_later(down_s, self.start_bootstrap, number)

    def running(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers.values() if not worker.over]

    def all_ready(self) -> bool:
        """Return whether every worker holds a lease at each bootstrap and has passed its canaries."""
        return all(map(self._all_ready_at, self.present))

    def _all_ready_at(self, bootstrap: SimulatedBootstrap) -> bool:
        states = {w.facts.incarnation: w.state.value for w in bootstrap.registry.workers()}
        if bootstrap.process.dead:
            return False  # what it knew is out of date
        return all(not w.over and states.get(w.incarnation) == "ready" for w in self.workers.values())

    def sides_of(self, worker: SimulatedWorker) -> list[SimulatedWorker]:
        """Return the workers of this worker's process, itself included."""
        [names] = [names for names in self._processes if worker.name in names]
        return [self.workers[name] for name in names]

    def _start_process(self, names: tuple[str, ...]) -> None:
        self._pids += 1
        for name in names:
            worker = SimulatedWorker(self._world, *self._stack[name], name, self._pids, self._on_end)
            self.workers[name] = worker
            self.everyone.append(worker)
        for name in names:
            worker = self.workers[name]
            worker.other_sides = [each for each in self.sides_of(worker) if each is not worker]
            self._world.trace.note(self._world.loop.time(), name, "started", 0, f"pid {worker.pid}")
            worker.start()

    def _on_end(self, worker: SimulatedWorker, why: str) -> None:
        """A process has ended when all of its sides have. One that leaves lets the other finish, and one that
        dies takes it with it."""
        self._world.trace.note(self._world.loop.time(), worker.name, "ended", 0, why)
        sides = self.sides_of(worker)
        if why != LEFT:
            for each in sides:
                each.crash()
        if worker.pid in self._ended or not all(each.over for each in sides):
            return
        self._ended.add(worker.pid)
        if self._random.random() < self._world.shape.troubles.told_share:
            after_s = self._random.uniform(0.0, 0.2)
            for each in sides:
                for address in self._world.bootstraps:
                    self._process.spawn(self._report(each, after_s, address))
        names = tuple(each.name for each in sides)
        self._world.loop.call_later(self._random.uniform(0.05, 2.5), self._start_process, names)

    async def _report(self, worker: SimulatedWorker, after_s: float, address: str) -> None:
        await asyncio.sleep(after_s)
        stub = workers_pb2_grpc.WorkerRegistryStub(Channel(self._world.network, address))
        request = workers_pb2.ReportExitRequest(name=worker.name, pid=worker.pid, secret=worker.exit_secret)
        for _ in range(REPORT_TRIES):
            try:
                await stub.ReportExit(request, timeout=1.0)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.5)
            else:
                return
