"""Which implementations is a prefill worker made of? The only place that picks."""

import asyncio
import secrets
from functools import partial

from prometheus_client import CollectorRegistry

from services.engine.device import bind_thread
from services.engine.engine import Engine
from services.engine.folds import Folds
from services.engine.start import Load, start_rank
from services.engine.stepper import Stepper
from services.engine.team import TeamBroken
from services.ids import Incarnation
from services.pages.checksum import KvChecksum
from services.pages.holdings import Holdings
from services.pages.pool import PagePool
from services.pages.prefixes import PrefixTree
from services.pages.record import SCHEMA_HASH, SLOT_BYTES
from services.pages.slots import SlotPool
from services.pages.topology import rank_layout
from services.parallel.interface import GroupBroken
from services.prefill.metrics import PrefillMetrics
from services.prefill.rpc import HandoverService, PrefillService
from services.prefill.settings import PrefillSettings
from services.prefill.turn import PrefillWork
from services.prefill.ways import Ways
from services.rooms.deadlines import Deadlines
from services.rooms.errors import RostersDiverged
from services.rooms.phases import Side
from services.runtime import serve
from services.runtime.arrivals import SystemArrivals
from services.runtime.clock import SystemClock
from services.runtime.cpus import pin
from services.runtime.host_memory import HostMemory
from services.runtime.logging import name_rooms
from services.runtime.process_metrics import describe_process
from services.transfer.interface import Region
from services.transfer.nixl import NixlTransfer
from services.transfer.nixl_library import install_memory_hooks
from services.transfer.start import offering
from services.wire import credential
from services.wire.baton.v1 import inference_pb2_grpc, workers_pb2
from services.wire.conversions import layout_to_wire, side_to_wire, topology_to_wire
from services.wire.credential import of_ranks
from services.wire.model_bounds import ModelBounds
from services.worker.follower_host import FollowerHost
from services.worker.leader_host import Role, WorkerHost
from services.worker.startup import agree_on, explained, form_group, load_together
from services.worker.turns import TurnProgress, run_turns

BROKEN = (GroupBroken, RostersDiverged, TeamBroken)
"""What ends a rank's turns because of another rank."""


def run(settings: PrefillSettings, load: Load = start_rank) -> int:
    """Run a prefill worker, or one rank of it, until it is told to stop. Returns the exit code."""
    threads = pin(settings.cpus, settings.threads)
    return serve.run(partial(_main, settings, threads, load))


async def _main(settings: PrefillSettings, threads: int, load: Load, shutdown: asyncio.Event) -> int:
    install_memory_hooks()
    mine, own = Incarnation(secrets.randbits(63) | 1), credential.draw()
    host = FollowerHost(settings) if settings.rank else WorkerHost(settings, mine, own)
    try:
        return await _serve(settings, threads, load, host, mine, of_ranks(own), shutdown)
    finally:
        await host.close()


async def _serve(
    settings: PrefillSettings,
    threads: int,
    load: Load,
    host: WorkerHost | FollowerHost,
    mine: Incarnation,
    ranks_word: bytes,
    shutdown: asyncio.Event,
) -> int:
    clock, registry = SystemClock(), CollectorRegistry()
    metrics = PrefillMetrics(registry)
    describe_process(registry, settings.role, settings.name, settings.rank or 0)
    checksum = KvChecksum(settings.kv_checksum)
    topology, rank = settings.topology, settings.rank or 0
    progress = TurnProgress(clock)
    await host.start_pages(registry, progress)

    formed = await serve.unless_stopped(shutdown, form_group(settings, mine, ranks_word.hex()))
    group = formed.group
    if isinstance(host, FollowerHost):
        host.led_by(Incarnation(formed.leaders), bytes.fromhex(formed.leaders_word))
    loop = asyncio.get_running_loop()
    loading = loop.run_in_executor(None, load, settings, threads)
    engine: Engine = await serve.unless_stopped(shutdown, load_together(group, loading))
    await agree_on(group, {"model": engine.layout.model, "pages": str(engine.cache.pages)})
    bind_thread(engine.cache.device)  # this one makes all calls of the transfer
    layouts = [rank_layout(engine.whole, topology, each) for each in range(topology.ranks)]
    slots = HostMemory(settings.places * SLOT_BYTES)
    with offering(engine.cache.device):
        transfer = NixlTransfer(mine)
        transfer.register(Region("kv", engine.cache.address, engine.cache.length, engine.cache.device))
        transfer.register(Region("slots", slots.address, slots.length))

    stepper = Stepper(engine, host.mailbox.wake)
    prefixes = PrefixTree(engine.layout.page_tokens) if settings.prefix_cache else None
    work = PrefillWork(
        places=settings.places,
        holdings=Holdings(PagePool(engine.cache.pages), SlotPool(slots.view), prefixes),
        layout=engine.layout,
        bounds=ModelBounds(engine.model.vocab_size, engine.model.facts.context_length),
        stepper=stepper,
        transfer=transfer,
        mailbox=host.mailbox,
        reporter=host.reporter,
        metrics=metrics,
        clock=clock,
        deadlines=Deadlines(
            bootstrapping_ms=settings.bootstrap_timeout_ms,
            waiting_ms=settings.waiting_timeout_ms,
            transferring_ms=settings.transfer_timeout_ms,
            success_ms=settings.transfer_timeout_ms,
            fence_ms=settings.transfer_timeout_ms,
        ),
        chunk_tokens=settings.chunk_tokens,
        window_bytes=settings.transfer_window,
        ways=Ways(transfer, layouts, rank, checksum),
        checksum=checksum,
        folds=Folds(engine.grammars, host.mailbox.wake),
        scored_tokens=engine.scored_max,
    )
    name_rooms(work.names_of)
    turns = explained(run_turns(work, group, clock, progress, SystemArrivals(loop, clock)), group, TeamBroken)
    try:
        if isinstance(host, FollowerHost):
            return await host.serve(turns, BROKEN, shutdown)
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(
            PrefillService(work, host.mailbox, mine), host.server.grpc
        )
        handover = HandoverService(work, host.mailbox, mine, layouts)
        inference_pb2_grpc.add_HandoverServiceServicer_to_server(handover, host.server.grpc)
        role = Role(
            registration=workers_pb2.RegisterRequest(
                side=side_to_wire(Side.PREFILL),
                topology=topology_to_wire(topology),
                layout=layout_to_wire(engine.whole),
                schema=SCHEMA_HASH,
                kv_checksum=checksum.value,
                tokens_max=engine.cache.pages * engine.layout.page_tokens,
                rooms_max=settings.max_rooms,
                keeps_prefixes=settings.prefix_cache,
            ),
            services=("baton.v1.PrefillService", "baton.v1.HandoverService"),
            turns=turns,
            on_renewal=metrics.worker.lease_tried,
            broken=BROKEN,
            break_off=work.break_off,
            census=work.census,
        )
        try:
            return await host.serve(role, shutdown)
        finally:
            handover.leave()
    finally:
        await group.close()  # whatever it was: the other ranks learn it now
        await stepper.end()
        transfer.close()
