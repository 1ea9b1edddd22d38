"""A registry in this process, and a prefill and a decode worker in processes of their own.

Everything but the engine is as in production: leases, turns, gRPC, NIXL. The bootstrap's registry and
backend run without HTTP. Each request has one prompt and draws two tokens.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from baton.bootstrap.bootstrap_services import RoomService, WorkerRegistry
from baton.bootstrap.canary import OUTPUT_TOKENS, REQUEST_ID, Canary
from baton.bootstrap.metrics import BootstrapMetrics
from baton.bootstrap.room_backend import RoomBackend
from baton.bootstrap.room_controller import RoomController
from baton.fleet.registry import Registry
from baton.fleet.worker_record import WorkerState
from baton.rooms.phases import Side
from baton.rooms.request import Request, Sampling
from baton.runtime.clock import SystemClock
from baton.runtime.errors import StartupError
from baton.runtime.listening_ports import port_of, reserve_port
from baton.wire.baton.v1 import rooms_pb2_grpc, workers_pb2_grpc
from baton.wire.channel import Channels, Server
from baton.wire.service_role import ServiceRole
from bench.workers.rooms_worker import CONTEXT, MODEL, live

HOST: Final = "127.0.0.1"
PROMPT: Final = 64
DRAWN: Final = 2
REQUEST_S: Final = 60.0
LEASE_MS: Final = 5_000
QUEUE: Final = 1024
LOOK_S: Final = 0.002
TICKS_S: Final = os.sysconf("SC_CLK_TCK")

Round = dict[str, float]


def measure(runs: int, count: int, concurrency: int, patience_s: float) -> list[Round]:
    """Measure `count` rooms and as many bare gRPC calls, in seconds, round by round."""
    rounds: list[Round] = uvloop.run(_measure(runs, count, concurrency, patience_s))
    return rounds


async def _measure(runs: int, count: int, concurrency: int, patience_s: float) -> list[Round]:
    async with AsyncExitStack() as stack:
        bench = await _start(stack, patience_s)
        await bench.rooms(count, concurrency)
        return [await bench.round(count, concurrency) for _ in range(runs)]


@dataclass(frozen=True, slots=True)
class _Worker:
    pid: int
    metrics: str

    def cpu_s(self) -> float:
        words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICKS_S

    async def turns(self, client: httpx.AsyncClient) -> float:
        text = (await client.get(self.metrics)).text
        families = text_string_to_metric_families(text)
        return sum(
            each.value for family in families for each in family.samples if each.name == "baton_turns_total"
        )


class _Bench:
    def __init__(
        self,
        registry: Registry,
        backend: RoomBackend,
        workers: dict[str, _Worker],
        health: health_pb2_grpc.HealthStub,
        client: httpx.AsyncClient,
    ) -> None:
        self._registry = registry
        self._backend = backend
        self._workers = workers
        self._health = health
        self._client = client

    async def round(self, count: int, concurrency: int) -> Round:
        told: Round = {}
        before = await self._spent()
        started = time.perf_counter()
        await self.rooms(count, concurrency)
        told["rooms"] = time.perf_counter() - started
        after = await self._spent()
        started = time.perf_counter()
        await _each(self._call, count, concurrency)
        told["calls"] = time.perf_counter() - started
        return told | {key: after[key] - before[key] for key in after}

    async def rooms(self, count: int, concurrency: int) -> None:
        """Run rooms and wait until all are retired."""
        await _each(self._room, count, concurrency)
        async with asyncio.timeout(REQUEST_S):
            while self._registry.open_count():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(LOOK_S)

    async def _room(self, number: int) -> None:
        prompt = (number, *range(PROMPT - 1))
        greedy = Sampling(temperature=0.0)
        request = Request(f"bench-{number}", prompt, DRAWN, ignore_eos=True, sampling=greedy)
        stream = await self._backend.generate(request)
        while (await stream.next()).finish is None:
            pass

    async def _call(self, _: int) -> None:
        await self._health.Check(health_pb2.HealthCheckRequest(), timeout=REQUEST_S)

    async def _spent(self) -> Round:
        spent = {"registry cpu": time.process_time()}
        for name, worker in self._workers.items():
            spent[f"{name} turns"] = await worker.turns(self._client)
            spent[f"{name} cpu"] = worker.cpu_s()
        return spent


async def _each(work: Callable[[int], Awaitable[None]], count: int, concurrency: int) -> None:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*(some() for _ in range(concurrency)))


async def _start(stack: AsyncExitStack, patience_s: float) -> _Bench:
    clock, channels, server = SystemClock(), Channels(), Server()
    stack.push_async_callback(channels.close)
    port = server.bind(HOST, 0)
    registry = Registry(model=MODEL, first_room=1, lease_ms=LEASE_MS, done_max=1024, failed_max=1024)
    rooms = RoomController(registry, clock, channels, BootstrapMetrics(CollectorRegistry()), QUEUE, LEASE_MS)
    stack.callback(rooms.streams.close)
    backend = RoomBackend(rooms, CONTEXT, REQUEST_S)
    workers_pb2_grpc.add_WorkerRegistryServicer_to_server(WorkerRegistry(rooms), server.grpc)
    rooms_pb2_grpc.add_RoomServiceServicer_to_server(RoomService(rooms), server.grpc)
    await server.start(("baton.v1.WorkerRegistry", "baton.v1.RoomService"))
    stack.push_async_callback(server.stop, 0)
    canary = Canary(rooms, backend, Request(REQUEST_ID, (1,), OUTPUT_TOKENS, ignore_eos=True))
    for work in (rooms.keep_time(), canary.run()):
        stack.callback(asyncio.create_task(work).cancel)
    workers = {side.value: _spawn(stack, side, f"{HOST}:{port}") for side in Side}
    await _until_ready(registry, patience_s)
    address = next(each.facts.address for each in registry.workers() if each.facts.side is Side.PREFILL)
    health = health_pb2_grpc.HealthStub(channels.to(address, ServiceRole.PREFILL))
    client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
    return _Bench(registry, backend, workers, health, client)


def _spawn(stack: AsyncExitStack, side: Side, bootstrap: str) -> _Worker:
    port = port_of(stack.enter_context(reserve_port(HOST)))
    process = multiprocessing.get_context("spawn").Process(
        target=live, args=(side.value, bootstrap, port), daemon=True
    )
    process.start()
    stack.callback(process.join, 10.0)
    stack.callback(process.kill)
    assert process.pid is not None
    return _Worker(process.pid, f"http://{HOST}:{port}/metrics")


async def _until_ready(registry: Registry, patience_s: float) -> None:
    try:
        async with asyncio.timeout(patience_s):
            ready = WorkerState.READY
            while sum(each.state is ready for each in registry.workers()) < len(Side):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError as error:
        raise StartupError(f"the workers were not ready in {patience_s:g} s") from error
