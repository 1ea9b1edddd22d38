"""How does a worker's process live: bind, register, turn, drain, leave?

Everything of it that does not depend on the role. The role brings its services and its turn loop.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry

from services.rooms.ids import Incarnation
from services.runtime.http_server import HttpServer
from services.runtime.listen import bind_port, cannot_listen
from services.runtime.logging import Log
from services.runtime.metrics_http import serve_metrics
from services.runtime.worker_settings import WorkerSettings
from services.wire.baton.v1 import group_pb2, rooms_pb2, workers_pb2
from services.wire.channel import Channels, Server
from services.wire.lease import LeaseKeeper
from services.wire.mailbox import Mailbox
from services.wire.reporter import Reporter

log = Log(__name__)

STOP_GRACE_S: Final = 1.0
FLUSH_S: Final = 2.0
DRAIN_ASK_S: Final = 0.1
STUCK_MS: Final = 60_000
"""Turns are short and idle ones end every second: a silence this long means that the loop hangs."""


@dataclass(frozen=True, slots=True)
class Role:
    """What is particular to prefill or decode."""

    registration: workers_pb2.RegisterRequest
    """Its `worker` is filled in by the host."""
    services: Sequence[str]
    """Full names of the gRPC services that were added to the host's server."""
    turns: Coroutine[Any, Any, None]
    start_draining: Callable[[], None]
    on_renewal: Callable[[], None]


class WorkerHost:
    """One worker process on the wire. Made before the slow part of a start: a busy port fails first."""

    def __init__(self, settings: WorkerSettings, incarnation: Incarnation) -> None:
        """Raises StartupError for a port that is in use."""
        self._settings = settings
        self._pages_socket = bind_port(settings.host, settings.metrics_port, "--metrics-port")
        self._pages: HttpServer | None = None
        self.incarnation = incarnation
        self.mailbox = Mailbox()
        self.channels = Channels()
        self.server = Server()
        try:
            self.port = self.server.bind(settings.host, settings.grpc_port)
        except OSError as error:
            raise cannot_listen(settings.host, settings.grpc_port, "--grpc-port") from error
        self.reporter = Reporter(self.channels.to(settings.bootstrap), incarnation, settings.name)
        self._lease: LeaseKeeper | None = None

    @property
    def problem(self) -> str | None:
        """Why no room can come yet, or None."""
        return "still starting" if self._lease is None else self._lease.problem

    async def start_pages(self, registry: CollectorRegistry, stuck_ms: Callable[[], int]) -> None:
        """Serve /metrics, /health and /ready from now on. `stuck_ms`: since a turn last ended."""

        def unhealthy() -> list[str]:
            stuck = self.problem is None and stuck_ms() > STUCK_MS
            return [f"no turn has ended for {stuck_ms()} ms"] if stuck else []

        def unready() -> list[str]:
            return [self.problem] if self.problem else []

        self._pages = await serve_metrics(self._pages_socket, registry, unhealthy, unready)
        log.info("listening", worker=self._settings.name, grpc_port=self.port, metrics_port=self._pages.port)

    async def serve(self, role: Role, shutdown: asyncio.Event) -> int:
        """Serve until `shutdown` is set and all rooms have ended. Returns the exit code.

        Raises what ended the turns or a helper; the streams of all rooms break then, at once.
        """
        registration = workers_pb2.RegisterRequest()
        registration.CopyFrom(role.registration)
        registration.worker.CopyFrom(
            rooms_pb2.Peer(
                name=self._settings.name,
                incarnation=self.incarnation,
                address=f"{self._settings.advertise}:{self.port}",
            )
        )
        registration.pid = os.getpid()
        lease = LeaseKeeper(
            self.channels.to(self._settings.bootstrap), registration, self._departed, role.on_renewal
        )
        self._lease = lease
        await self.server.start(role.services)
        await self.server.set_serving(serving=True)
        turns = asyncio.create_task(role.turns, name="turns")
        helpers = [asyncio.create_task(lease.run()), asyncio.create_task(self.reporter.run())]
        stopping = asyncio.create_task(shutdown.wait())
        try:
            await asyncio.wait({turns, stopping, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            _raise_if_failed(turns, *helpers)
            timeout_ms = self._settings.drain_timeout_ms
            await drain(role.start_draining, lease, turns, self.mailbox, self.reporter, timeout_ms)
            return 0 if turns.done() else 1
        except Exception:
            await self.server.stop(0)
            raise
        finally:
            for task in (turns, stopping, *helpers):
                task.cancel()
            await asyncio.gather(turns, stopping, *helpers, return_exceptions=True)

    async def close(self) -> None:
        """Break what streams are left, and end the servers."""
        await self.server.stop(STOP_GRACE_S)
        await self.channels.close()
        if self._pages is not None:
            await self._pages.stop()

    def _departed(self, incarnations: Sequence[Incarnation]) -> None:
        for incarnation in incarnations:
            self.mailbox.put(group_pb2.Command(departed=incarnation))


async def drain(
    start_draining: Callable[[], None],
    lease: LeaseKeeper,
    turns: asyncio.Task[None],
    mailbox: Mailbox,
    reporter: Reporter,
    timeout_ms: int,
) -> None:
    """Ask for no more rooms, serve those that were opened here, say goodbye (`drain-keeps-promises`).

    A room that was opened before the bootstrap knew may still be on its way: rooms are refused only
    once there are none of these. Raises what ended the turns.
    """
    log.info("draining")
    loop = asyncio.get_running_loop()
    ends = loop.time() + timeout_ms / 1000
    while await lease.drain() and loop.time() < ends and not turns.done():
        await asyncio.wait({turns}, timeout=DRAIN_ASK_S)
    start_draining()
    mailbox.wake()
    await asyncio.wait({turns}, timeout=max(ends - loop.time(), 0))
    _raise_if_failed(turns)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            await reporter.flush()
    if turns.done():
        await lease.leave()
    else:
        # No goodbye: peers take it for the proof that nothing of this process is written any more.
        log.warning("rooms were cut off: the drain timeout passed")


def _raise_if_failed(*tasks: asyncio.Task[None]) -> None:
    """What ended by itself while it should have gone on."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
