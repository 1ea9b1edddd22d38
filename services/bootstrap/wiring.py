"""Which implementations is the bootstrap made of? The only place that picks."""

import asyncio
import secrets
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry

from services.bootstrap.attempts import RoomBackend
from services.bootstrap.canary import Canary
from services.bootstrap.http import admin_router
from services.bootstrap.metrics import BootstrapMetrics, RegistryCollector
from services.bootstrap.rooms import Rooms
from services.bootstrap.rpc import RoomService, WorkerRegistry
from services.bootstrap.settings import BootstrapSettings
from services.openai.api_settings import ApiSettings
from services.openai.app import create_app
from services.openai.model import ServedModel, load_served_model
from services.openai.tokenizer import keep_torch_out
from services.rooms.registry import Registry
from services.rooms.retry import RetryBounds
from services.runtime import serve
from services.runtime.clock import SystemClock
from services.runtime.http_server import serve_http
from services.runtime.listen import bind_port, cannot_listen
from services.runtime.logging import Log
from services.runtime.model_facts import ModelFacts, read_model
from services.runtime.model_files import prepare, resolve
from services.wire.baton.v1 import rooms_pb2_grpc, workers_pb2_grpc
from services.wire.channel import Channels, Server

log = Log(__name__)

STOP_GRACE_S = 1.0
ROOM_ID_BITS = 62


def run(settings: BootstrapSettings) -> int:
    """Run the bootstrap until it is told to stop. Returns the exit code."""
    keep_torch_out()
    return serve.run(partial(_main, settings))


async def _main(settings: BootstrapSettings, shutdown: asyncio.Event) -> int:
    http_socket = bind_port(settings.host, settings.http_port, "--http-port")
    server, channels = Server(), Channels()
    try:
        grpc_port = server.bind(settings.host, settings.grpc_port)
    except OSError as error:
        raise cannot_listen(settings.host, settings.grpc_port, "--grpc-port") from error
    loop = asyncio.get_running_loop()
    facts, model = await loop.run_in_executor(None, _load, settings)

    clock, metrics_registry = SystemClock(), CollectorRegistry()
    metrics = BootstrapMetrics(metrics_registry)
    registry = Registry(
        model=facts.fingerprint,
        first_room=secrets.randbits(ROOM_ID_BITS) | 1,
        lease_ms=settings.lease_ms,
        kept=settings.rooms_kept,
        failed_kept=settings.failed_rooms_kept,
    )
    rooms = Rooms(registry, clock, channels, metrics, settings.max_queue, settings.queue_timeout_ms)
    metrics_registry.register(RegistryCollector(registry, rooms.queued))
    backend = RoomBackend(
        rooms,
        facts.context_length,
        settings.request_timeout_ms / 1000,
        RetryBounds(settings.room_attempts, settings.retry_wait_ms / 1000),
    )
    canary = Canary(rooms, backend)

    workers_pb2_grpc.add_WorkerRegistryServicer_to_server(WorkerRegistry(rooms), server.grpc)
    rooms_pb2_grpc.add_RoomServiceServicer_to_server(RoomService(rooms), server.grpc)
    await server.start(("baton.v1.WorkerRegistry", "baton.v1.RoomService"))
    await server.set_serving(serving=True)
    app = create_app(
        backend,
        model,
        metrics_registry,
        ApiSettings(body_bytes_max=settings.body_limit),
        clock,
        [admin_router(registry, metrics_registry, lambda: canary.problem)],
    )
    http = await serve_http(app, http_socket, settings.drain_timeout_ms // 1000)
    log.info("listening", http_port=http.port, grpc_port=grpc_port, model=model.name)

    tasks = [asyncio.create_task(rooms.keep_time()), asyncio.create_task(canary.run())]
    stopping = asyncio.create_task(shutdown.wait())
    try:
        done, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
        log.info("draining", rooms=registry.open_count())
        await http.stop()
        return 0
    finally:
        for task in (stopping, *tasks):
            task.cancel()
        await asyncio.gather(stopping, *tasks, return_exceptions=True)
        await server.stop(STOP_GRACE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await rooms.finish()
        rooms.links.close()
        await channels.close()


def _load(settings: BootstrapSettings) -> tuple[ModelFacts, ServedModel]:
    directory = prepare(resolve(settings.model), lambda line: log.info("preparing the model", step=line))
    facts = read_model(directory, settings.served_model_name)
    return facts, load_served_model(directory, facts)
