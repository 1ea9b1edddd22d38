"""Wiring of a worker's process: which implementations it uses, how it starts and how it ends."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import grpc
from prometheus_client import CollectorRegistry

from baton.engine_interface import Engine, EngineLoader, RankGroupBroken
from baton.ids import Incarnation
from baton.pages.errors import added
from baton.pages.kv_checksum import KvChecksum
from baton.pages.rank_layout import rank_layout
from baton.pages.record import SCHEMA_HASH
from baton.parallel.gloo import GlooGroup
from baton.parallel.rank_group import GroupBroken, RankGroup
from baton.rooms.errors import RostersDiverged
from baton.rooms.phases import Side
from baton.runtime import service_process
from baton.runtime.clock import Clock, SystemClock
from baton.runtime.cpu_affinity import pin
from baton.runtime.logging import Log, name_rooms
from baton.runtime.worker_settings import WorkerSettings
from baton.telemetry.process_metrics import describe_process
from baton.transfer.exposure import Exposure
from baton.transfer.nixl import NixlTransfer
from baton.transfer.nixl_library import install_memory_hooks
from baton.transfer.refused_memory import explain_refused_memory
from baton.wire import worker_credential
from baton.wire.baton.v1 import rooms_pb2, workers_pb2, workers_pb2_grpc
from baton.wire.conversions import side_to_wire
from baton.wire.layout_messages import layout_to_wire, topology_to_wire
from baton.wire.model_bounds import ModelBounds
from baton.worker.assembly import RankMemory, RankPorts
from baton.worker.kv_event_publisher import KvEventPublisher, VllmKvEvents
from baton.worker.kv_event_service import KvEventService
from baton.worker.lifecycle.exit_reporter import ExitReporter
from baton.worker.lifecycle.follower_host import FollowerHost
from baton.worker.lifecycle.leader_host import Role, WorkerHost
from baton.worker.lifecycle.startup import agree_on, explained, form_group, load_together
from baton.worker.metrics import WorkerMetrics
from baton.worker.pending_events import SystemPendingEvents
from baton.worker.rank_work import RankWork
from baton.worker.step_thread import StepThread
from baton.worker.turn_loop import TurnProgress, run_turns

log = Log(__name__)

BROKEN: Final = (GroupBroken, RostersDiverged, RankGroupBroken)
"""Exceptions that end this rank's turns because another rank failed or differs."""

Settings = TypeVar("Settings", bound=WorkerSettings)
Metrics = TypeVar("Metrics", bound=WorkerMetrics)


@dataclass(frozen=True, slots=True)
class Rank(Generic[Settings]):
    """Parts of a rank whose group has met and whose engine is loaded."""

    settings: Settings
    host: WorkerHost | FollowerHost
    engine: Engine
    ports: RankPorts

    def registration(self, side: Side, peer: rooms_pb2.Peer) -> workers_pb2.RegisterRequest:
        """Return the message that registers the worker at the bootstrap. `peer`: facts about the worker that
        only its side has, such as the digest of its secret. The host adds name and address."""
        return workers_pb2.RegisterRequest(
            worker=peer,
            side=side_to_wire(side),
            topology=topology_to_wire(self.settings.topology),
            layout=layout_to_wire(self.engine.whole),
            schema=SCHEMA_HASH,
            kv_checksum=self.ports.checksum.value,
            tokens_max=min(
                cache.pages * group.page_tokens
                for cache, group in zip(self.engine.caches, self.engine.layout.groups, strict=True)
            ),
            rooms_max=self.settings.max_rooms,
            keeps_prefixes=self.ports.memory.keeps_prefixes,
            computes=side is Side.DECODE,
            engine=self.engine.facts.name,
            batch_invariant=self.engine.facts.batch_invariant,
            whole_prompts=not self.engine.facts.chunked_prompts,
        )


@dataclass(frozen=True, slots=True)
class Fitting:
    """Parts of a rank that differ between a prefill and a decode worker."""

    side: Side
    work: RankWork[Any, Any]
    services: Sequence[str]
    """Full names of the gRPC services that this side adds to the server, for health checks."""
    listen: Callable[[grpc.aio.Server], None]
    """Function that adds the side's services to the leader's gRPC server."""
    end: Callable[[], Awaitable[None]]
    """Function that ends all calls between this worker and workers of the other side. Called after the last
    turn."""
    peer: rooms_pb2.Peer
    """Facts of the worker's registration that its side provides. The host adds the worker's name and
    address."""


Fit = Callable[[Rank[Settings], Metrics], Fitting]


def run_worker(
    settings: Settings,
    load: EngineLoader,
    count: Callable[[CollectorRegistry], Metrics],
    fit: Fit[Settings, Metrics],
) -> int:
    """Run a worker, or one rank of it, until a signal stops it. Return the exit code.

    `load`: loads the engine. `count`: makes the metrics. `fit`: makes the parts of the rank that depend on
    its side.
    """
    threads = pin(settings.cpus, settings.threads)
    exit_reporter, settings = ExitReporter.prepare(settings, (settings.name,))

    async def main(shutdown: asyncio.Event) -> int:
        install_memory_hooks()
        exit_reporter.begin(settings)
        own = worker_credential.draw()
        mine = worker_credential.incarnation_of(own)
        host = FollowerHost(settings) if settings.rank else WorkerHost(settings, mine, own)
        start = Start(settings, partial(load, settings, threads), host, mine, worker_credential.of_ranks(own))
        try:
            return await start.serve(count, fit, shutdown)
        finally:
            await exit_reporter.end()
            await host.close()

    return service_process.run(main)


@dataclass(frozen=True, slots=True)
class Start(Generic[Settings]):
    """Parts of a rank's start that exist before its group has met and its engine is loaded."""

    settings: Settings
    load: Callable[[], Engine]
    host: WorkerHost | FollowerHost
    mine: Incarnation
    """Incarnation (id of the process) that the worker gets if this rank is its leader."""
    ranks_word: bytes
    """Credential by which the other ranks report for the worker, if this rank is its leader."""
    other_side: workers_pb2.OtherSide | None = None
    """Incarnation and facts of the other side, in a process that serves both prefill and decode. None in a
    process with one side."""
    thread: Executor | None = None
    """Executor that runs the engine steps of both sides of the process. None if this rank has a thread of its
    own."""

    async def serve(
        self,
        count: Callable[[CollectorRegistry], Metrics],
        fit: Fit[Settings, Metrics],
        shutdown: asyncio.Event,
    ) -> int:
        """Meet the other ranks, load the engine and take turns. Return the exit code.

        Raises StopRequested on a stop before the first turn, and the error that ended the start or the turns.
        """
        settings, host = self.settings, self.host
        clock, registry, loop = SystemClock(), CollectorRegistry(), asyncio.get_running_loop()
        metrics = count(registry)
        describe_process(registry, settings.role, settings.name, settings.rank or 0)
        progress = TurnProgress(clock)
        await host.start_pages(registry, progress)

        formed = await service_process.unless_stopped(
            shutdown, form_group(settings, GlooGroup.join, self.mine, self.ranks_word.hex())
        )
        group, leader = formed.group, Incarnation(formed.leaders)
        if isinstance(host, FollowerHost):
            host.led_by(leader, bytes.fromhex(formed.leaders_word))
        loading = loop.run_in_executor(None, self.load)
        engine: Engine = await service_process.unless_stopped(shutdown, load_together(group, loading))
        pages = added(cache.pages for cache in engine.caches)
        await agree_on(group, {"model": engine.layout.model, "pages": pages, "engine": engine.facts.name})
        engine.bind_thread()  # this thread makes all calls of the transfer
        ports = self._ports(engine, leader, clock)
        rank = Rank(settings, host, engine, ports)
        fitted = fit(rank, metrics)
        work = fitted.work
        name_rooms(work.names_of, also=self.thread is not None)
        turning = run_turns(work, group, clock, progress, SystemPendingEvents(loop, clock))
        turns = explained(turning, group, RankGroupBroken)
        try:
            if isinstance(host, FollowerHost):
                return await host.serve(turns, BROKEN, shutdown)
            fitted.listen(host.server.grpc)
            registration = rank.registration(fitted.side, fitted.peer)
            if self.other_side is not None:
                registration.other_side.CopyFrom(self.other_side)
            role = Role(
                registration=registration,
                services=fitted.services,
                turns=turns,
                on_renewal=metrics.leases.tried,
                broken=BROKEN,
                break_off=work.break_off,
                holds=work.holds,
                load=work.load,
                on_orphan=work.renew_leases_by,
                watch_leases=metrics.leases.watch,
            )
            async with offer_kv_events(host, ports, settings):
                return await host.serve(role, shutdown)
        finally:
            await end(group, fitted.end, ports.step_thread, ports.exposure)

    def _ports(self, engine: Engine, worker: Incarnation, clock: Clock) -> RankPorts:
        """Make the `RankPorts` of a rank whose engine is loaded. Raises TransferError."""
        settings, mailbox, topology = self.settings, self.host.mailbox, self.settings.topology
        memory = RankMemory.of(
            engine.caches,
            [cache.pages for cache in engine.caches],
            engine.layout,
            settings.room_limit,
            keeps_prefixes=settings.prefix_cache and engine.facts.chunked_prompts,
        )
        with explain_refused_memory(engine.caches[0].device):
            exposure = Exposure(NixlTransfer, draw_incarnation, memory.regions)
        return RankPorts(
            incarnation=worker,
            layouts=[rank_layout(engine.whole, topology, rank) for rank in range(topology.ranks)],
            rank=settings.rank or 0,
            bounds=ModelBounds(
                engine.vocab_size,
                engine.context_length,
                whole_prompts=not engine.facts.chunked_prompts,
            ),
            checksum=KvChecksum(settings.kv_checksum),
            step_thread=StepThread(engine, mailbox.wake, self.thread, None if self.thread is None else clock),
            grammars=engine.grammars,
            memory=memory,
            exposure=exposure,
            mailbox=mailbox,
            reporter=self.host.reporter,
            clock=clock,
        )


@asynccontextmanager
async def offer_kv_events(
    host: WorkerHost, ports: RankPorts, settings: WorkerSettings
) -> AsyncIterator[None]:
    """Log the changes of the leader's prefix cache in this context. Serve the log to routers, and publish it
    over ZMQ where the settings ask for that. Raises StartupError."""
    kv_log = ports.memory.log_prefixes()
    if kv_log is None:
        if settings.kv_events_endpoint:
            log.warning("no KV events are published: there is no prefix cache")
        yield
        return
    service = KvEventService(ports.incarnation, kv_log)
    workers_pb2_grpc.add_KvEventServiceServicer_to_server(service, host.server.grpc)
    if not settings.kv_events_endpoint:
        yield
        return
    kv_log.further = events = VllmKvEvents(kv_log.block_tokens)
    publisher = KvEventPublisher(
        events, settings.kv_events_endpoint, settings.kv_events_replay_endpoint, settings.kv_events_topic
    )
    publishing = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        publisher.close()


async def end(
    group: RankGroup, leave: Callable[[], Awaitable[None]], step_thread: StepThread, exposure: Exposure
) -> None:
    """End the parts of a rank after its last turn: rank group, calls to other workers, step thread, exposed
    memory.

    The other ranks learn of the end first, then the workers of the other side (`leave`). Then a running step
    is awaited. Raises EngineStuck if the step does not end.
    """
    await group.close()
    await leave()
    await step_thread.end()
    exposure.close()


def draw_incarnation() -> Incarnation:
    return Incarnation(secrets.randbits(63) | 1)
