"""Assembly of the router from its parts. No other module chooses their implementations."""

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from baton.api.app import create_app, create_pages
from baton.api.served_model import ServedModel, load_served_model
from baton.api.settings import ApiSettings
from baton.api.text.tokenizer import keep_torch_out
from baton.bootstrap.accept_probe import AcceptProbe
from baton.bootstrap.admin_routes import admin_router, probe_router, unavailable
from baton.bootstrap.bootstrap_services import BootstrapService, RoomService, WorkerRegistry
from baton.bootstrap.canary import Canary
from baton.bootstrap.canary_request import canary_request
from baton.bootstrap.kv_event_streams import KvEventStreams
from baton.bootstrap.listeners import HttpServers, open_listeners
from baton.bootstrap.metrics import BootstrapMetrics, RegistryCollector
from baton.bootstrap.peer_bootstraps import PeerBootstraps
from baton.bootstrap.reasoning_key import read_reasoning_key
from baton.bootstrap.room_backend import RoomBackend
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.settings import BootstrapSettings
from baton.bootstrap.stack_metrics import StackCollector
from baton.bootstrap.timeline.routes import page_router, timeline_router
from baton.fleet.registry import Registry
from baton.fleet.retry import RetryBounds
from baton.ids import RoomId
from baton.models.model_facts import ModelFacts, read_model
from baton.models.model_files import prepare, resolve
from baton.rooms.errors import Cause, Reason, UnknownRoom
from baton.runtime import service_process
from baton.runtime.clock import Clock, SystemClock
from baton.runtime.garbage_collection import freeze_loaded_objects
from baton.runtime.listening_ports import cannot_listen, reserve_port
from baton.runtime.logging import Log, name_rooms
from baton.runtime.model_options import GenerationConfig, LoadFormat
from baton.runtime.reachability import local_address_of
from baton.runtime.setting_kinds import join_address
from baton.telemetry.process_metrics import describe_process
from baton.telemetry.room_spans import RoomSpans
from baton.telemetry.trace_endpoint import make_tracer
from baton.telemetry.tracing import Tracer
from baton.web.closed_connections import ClosedConnections
from baton.wire.baton.v1 import bootstraps_pb2_grpc, rooms_pb2_grpc, workers_pb2_grpc
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.channel import Channels, Server
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity

log = Log(__name__)

STOP_GRACE_S: Final = 1.0
LAST_WORDS_S: Final = 2
"""Longest time in seconds for clients to receive the reason for which their requests are cut off at
shutdown."""
ROOM_ID_BITS: Final = 62
READY_S: Final = 20.0
"""Longest time in seconds for which a router leaves a shared port to others because no workers serve."""
READY_LOOK_S: Final = 0.02


def run(settings: BootstrapSettings) -> int:
    """Run the router until a signal stops it. Return the exit code."""
    keep_torch_out()
    return service_process.run(partial(_main, settings))


async def _main(settings: BootstrapSettings, shutdown: asyncio.Event) -> int:
    listeners, reasoning_key = open_listeners(settings), read_reasoning_key(settings)
    identity = Identity.of(settings.tls)
    server = Server(identity, settings.run_token)
    channels = Channels.showing(identity, settings.run_token)
    grpc_port = _bind(server, settings)
    tracer = make_tracer(
        settings.otlp_endpoint, settings.trace_sample, f"baton-{settings.role}", settings.role, os.environ
    )
    loop = asyncio.get_running_loop()
    facts, model = await service_process.unless_stopped(shutdown, loop.run_in_executor(None, _load, settings))

    metrics_registry, clock = CollectorRegistry(), SystemClock()
    describe_process(metrics_registry, settings.role, settings.role, rank=0)
    rooms = _make_rooms(settings, facts, channels, RoomSpans(tracer, "room"), clock, metrics_registry)
    backend = _make_backend(settings, facts, rooms)
    canary = Canary(rooms, backend, canary_request(model, facts.context_length))
    own_address = join_address(local_address_of(settings.grpc_host), grpc_port)
    accept_probe = AcceptProbe(
        lambda: channels.to(own_address, ServiceRole.BOOTSTRAP), lambda: server.accepted, clock
    )
    await _start_grpc(server, rooms)
    probes = probe_router(rooms.registry, lambda: canary.problem)
    known = BootstrapAddresses(settings.peer_bootstraps)
    peers = PeerBootstraps(known, channels, rooms.opener, own_address, clock)
    admin = operator_routers(rooms, metrics_registry, peers)
    app = create_app(
        backend,
        model,
        metrics_registry,
        _api_settings(settings, reasoning_key),
        clock,
        [probes] if listeners.apart else [probes, *admin],
        listeners.api,
        tracer,
    )
    freeze_loaded_objects()
    running = (accept_probe.run(), rooms.keep_time(accept_probe.accepted_until_ms), canary.run())
    work = [asyncio.create_task(each) for each in running]
    http = await listeners.serve(
        app,
        lambda: create_pages(app, [probes, *admin], listeners.admin),
        settings.drain_timeout_ms // 1000 + LAST_WORDS_S,
        ClosedConnections(metrics_registry),
        partial(_until_ready, rooms.registry, shutdown),
    )
    log.info(
        "listening", http_port=http.port, admin_port=http.admin_port, grpc_port=grpc_port, model=model.name
    )
    try:
        return 0 if await _run(work, shutdown, http, rooms, settings.drain_timeout_ms) else 1
    finally:
        await _close(server, rooms, channels, tracer)


def _make_rooms(
    settings: BootstrapSettings,
    facts: ModelFacts,
    channels: Channels,
    spans: RoomSpans,
    clock: Clock,
    metrics_registry: CollectorRegistry,
) -> RoomController:
    registry = Registry(
        model=facts.fingerprint,
        first_room=secrets.randbits(ROOM_ID_BITS) | 1,
        lease_ms=settings.lease_ms,
        done_max=settings.rooms_kept,
        failed_max=settings.failed_rooms_kept,
        context_length=facts.context_length,
        weights_known=facts.weights_known,
    )
    rooms = RoomController(
        registry,
        clock,
        channels,
        BootstrapMetrics(metrics_registry),
        settings.max_queue,
        settings.queue_timeout_ms,
        spans,
        max_wait_ms=settings.max_wait_ms,
        kv_events=KvEventStreams(channels, registry),
    )
    name_rooms(partial(_ids, registry))
    queued = rooms.admission.queued_by_class, rooms.admission.queued_by_side
    metrics_registry.register(RegistryCollector(registry, *queued))
    metrics_registry.register(
        StackCollector(registry, rooms.admission.queue_counts, clock.now_ms, facts.name)
    )
    return rooms


def _make_backend(settings: BootstrapSettings, facts: ModelFacts, rooms: RoomController) -> RoomBackend:
    retry_wait_s = None if settings.retry_wait_ms is None else settings.retry_wait_ms / 1000
    return RoomBackend(
        rooms,
        facts.context_length,
        settings.request_timeout_ms / 1000,
        RetryBounds(settings.room_attempts, retry_wait_s),
    )


def _api_settings(settings: BootstrapSettings, reasoning_key: bytes) -> ApiSettings:
    return ApiSettings(
        body_bytes_max=settings.max_body_bytes,
        log_prompts=settings.log_prompts,
        trust_request_chat_template=settings.trust_request_chat_template,
        max_logprobs=settings.max_logprobs,
        clip_max_tokens=settings.clip_max_tokens,
        responses_kept=settings.responses_kept,
        responses_kept_bytes=settings.responses_kept_bytes,
        reasoning_key=reasoning_key,
        min_priority=settings.min_priority,
        tenant_header=settings.tenant_header,
    )


async def _start_grpc(server: Server, rooms: RoomController) -> None:
    workers_pb2_grpc.add_WorkerRegistryServicer_to_server(WorkerRegistry(rooms), server.grpc)
    rooms_pb2_grpc.add_RoomServiceServicer_to_server(RoomService(rooms), server.grpc)
    bootstraps_pb2_grpc.add_BootstrapServiceServicer_to_server(BootstrapService(rooms), server.grpc)
    await server.start(("baton.v1.WorkerRegistry", "baton.v1.RoomService", "baton.v1.BootstrapService"))
    await server.set_serving(serving=True)


async def _run(
    work: Sequence[asyncio.Task[None]],
    shutdown: asyncio.Event,
    http: HttpServers,
    rooms: RoomController,
    drain_timeout_ms: int,
) -> bool:
    """Run the router's background tasks until `shutdown` is set and requests are drained. Return whether all
    were answered. Raises the error of a task that failed."""
    stopping = asyncio.create_task(shutdown.wait())
    try:
        done, _ = await asyncio.wait({stopping, *work}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
        log.info("draining", rooms=rooms.registry.open_count())
        return await _drain(http, rooms, drain_timeout_ms)
    finally:
        for task in (stopping, *work):
            task.cancel()
        await asyncio.gather(stopping, *work, return_exceptions=True)


async def _until_ready(registry: Registry, shutdown: asyncio.Event) -> None:
    """Wait until a pair of workers serves, at most READY_S seconds, or until the router has to stop."""
    with suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while unavailable(registry) and not shutdown.is_set():  # noqa: ASYNC110 - once, at a start
                await asyncio.sleep(READY_LOOK_S)


async def _close(server: Server, rooms: RoomController, channels: Channels, tracer: Tracer) -> None:
    await server.stop(STOP_GRACE_S)
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_GRACE_S):
            await rooms.finish()
    rooms.streams.close()
    if rooms.kv_events is not None:
        await rooms.kv_events.close()
    await channels.close()
    await tracer.stop(STOP_GRACE_S)


def operator_routers(
    rooms: RoomController, metrics: CollectorRegistry, peers: PeerBootstraps
) -> list[APIRouter]:
    """Return the HTTP routes for operators, which are on the API's port or on their own."""
    return [admin_router(rooms.registry, metrics, rooms.weigh), timeline_router(rooms, peers), page_router()]


def _bind(server: Server, settings: BootstrapSettings) -> int:
    host, port, flag = settings.grpc_host, settings.grpc_port, "--grpc-port"
    reserve_port(host, port, flag, "--grpc-host").close()  # gRPC does not say what is wrong with an address
    try:
        return server.bind(host, port)
    except OSError as error:
        raise cannot_listen(host, port, flag) from error


async def _drain(http: HttpServers, rooms: RoomController, timeout_ms: int) -> bool:
    """Take no new requests, and answer all accepted ones (`drain-keeps-promises`). Requests that take longer
    than `timeout_ms` get an error with the reason. Return whether all were answered."""
    stopping = asyncio.create_task(http.api.stop())
    await asyncio.wait({stopping}, timeout=timeout_ms / 1000)
    in_time = stopping.done()
    if not in_time:
        log.warning("requests were cut off: the drain timeout passed", rooms=rooms.registry.open_count())
        text = f"the bootstrap stops, and its drain time of {timeout_ms / 1000:g} s has passed"
        rooms.end_all(Cause(Reason.BOOTSTRAP_LOST, text))
    await stopping
    await http.stop()
    return in_time


def _ids(registry: Registry, room: RoomId) -> Mapping[str, str]:
    """Return the request id and the trace id of a room, for log lines about the room."""
    try:
        entry = registry.get(room)
    except UnknownRoom:
        return {}
    return {"request_id": entry.request_id} | ({"trace_id": entry.trace_id} if entry.trace_id else {})


def _load(settings: BootstrapSettings) -> tuple[ModelFacts, ServedModel]:
    load_format = LoadFormat(settings.load_format)
    source = resolve(settings.model, load_format, may_lack_weights=True)
    directory = prepare(source, lambda line: log.info("preparing the model", step=line))
    facts = read_model(
        directory,
        next(iter(settings.served_names), ""),
        dummy=load_format is LoadFormat.DUMMY,
        context_length=settings.context_length,
        may_lack_weights=True,
    )
    if not facts.weights_known:
        log.info("no weights here: the first worker that registers decides which ones are served")
    model = load_served_model(
        directory,
        facts,
        GenerationConfig(settings.generation_config),
        settings.tool_call_parser,
        settings.reasoning_parser,
        describes_tools=settings.describe_tools,
        aliases=settings.served_names[1:],
    )
    return facts, model
