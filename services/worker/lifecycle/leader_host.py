"""Process of a worker, or of the leader of its ranks: bind ports, register, take turns, drain and leave.

It has the parts that do not depend on the side, prefill or decode. The side adds its gRPC services and its
turns. Other ranks have a `follower_host`. When the rank group breaks, all callers of rooms get an error, and
the process ends.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry

from baton.ids import Incarnation, Opener
from baton.rooms.errors import Cause, DeclaredGone, Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import LOST
from baton.runtime.clock import SystemClock
from baton.runtime.errors import GroupLost, ReportedGone
from baton.runtime.garbage_collection import freeze_loaded_objects
from baton.runtime.listening_ports import cannot_listen
from baton.runtime.logging import Log
from baton.runtime.reachability import is_reachable_from_elsewhere
from baton.runtime.service_process import end_now
from baton.runtime.setting_kinds import join_address, split_address
from baton.runtime.worker_settings import WorkerSettings
from baton.telemetry.room_spans import RoomSpans
from baton.telemetry.trace_endpoint import make_tracer
from baton.telemetry.tracing import SpanKind
from baton.wire.baton.v1 import group_pb2, rooms_pb2, workers_pb2, workers_pb2_grpc
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.channel import Channels, Server, open_thread_channel
from baton.wire.errors import Draining
from baton.wire.liveness import SERVICE as PRESENCE
from baton.wire.liveness import PresenceService
from baton.wire.registration import routers_to_wire
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from baton.worker.lifecycle.bootstrap_leases import BootstrapLeases
from baton.worker.lifecycle.lease_thread import LeaseThread
from baton.worker.lifecycle.status_pages import STARTING, Progress, StatusPages
from baton.worker.mailbox import Mailbox
from baton.worker.reporter import Reporter

log = Log(__name__)

STOP_GRACE_S: Final = 1.0
SPANS_S: Final = 1.5
"""Longest time in seconds to send the last trace spans when the process ends."""
FLUSH_S: Final = 2.0
DRAIN_ASK_S: Final = 0.1
LAST_WORD_S: Final = 0.3
TAKEN_FOR_GONE: Final = (
    "somebody reported its exit, or said goodbye in its name (ReportExit, Leave: look who may call the"
    " bootstrap). Its peers may use what it writes to for others, so it ends, to be started again"
)
LAST_REPLIES_S: Final = 0.7
"""Longest time in seconds to send the last replies on open streams and the last trace spans, after an error
ended the turns."""


@dataclass(frozen=True, slots=True)
class Role:
    """Parts of a worker that differ between prefill and decode, as `WorkerHost` uses them."""

    registration: workers_pb2.RegisterRequest
    """Registration message, to which the host adds the worker's name and address."""
    services: Sequence[str]
    """Full names of the gRPC services that the side added to the host's server, for health checks."""
    turns: Coroutine[Any, Any, None]
    on_renewal: Callable[[bool], None]
    """Function called after each attempt to renew the lease. Its argument says whether the worker has a
    lease."""
    broken: tuple[type[Exception], ...]
    """Exceptions that end the turns because the ranks of the worker cannot continue together."""
    break_off: Callable[[Cause], None]
    """Function that sends the given cause as the last reply to the callers of all rooms."""
    holds: Callable[[Opener], workers_pb2.RenewRequest] = lambda _: workers_pb2.RenewRequest()
    """Function that returns the message to renew the lease at one bootstrap, with the worker's load and its
    numbers of rooms and pages."""
    load: Callable[[Opener], rooms_pb2.WorkerLoad | None] = lambda _: None
    """Function that returns the worker's present load for one bootstrap, or None. The reporter sends it along
    when rooms have ended."""
    on_orphan: Callable[[Callable[[], None]], None] = lambda _: None
    """Function that gets a function which renews all leases now. It is called when a room becomes an
    orphan."""
    watch_leases: Callable[[Callable[[], tuple[int, int]]], None] = lambda _: None
    """Function that gets a function which returns the number of leases that the worker has, and of bootstraps
    that it knows."""


class WorkerHost:
    """Process-wide parts of a leader: gRPC server, lease, status pages, mailbox and reporter. They are made
    before the engine is loaded, so that a port in use is noticed first."""

    def __init__(self, settings: WorkerSettings, incarnation: Incarnation, credential: bytes) -> None:
        """Bind the gRPC port and the port of the status pages. Raises StartupError if one is in use."""
        self._settings = settings
        self._pages = StatusPages(settings)
        self._progress: Progress | None = None
        self._lost: str | None = None
        self.incarnation = incarnation
        self._credential = credential
        self.mailbox = Mailbox()
        identity = Identity.of(settings.tls)
        if identity is None and is_reachable_from_elsewhere(settings.host):
            log.warning(
                "gRPC is plain and open to whoever reaches it: --tls-cert is not set", host=settings.host
            )
        hosts = [split_address(each)[0] for each in settings.bootstrap]
        if any(map(is_reachable_from_elsewhere, hosts)) and not is_reachable_from_elsewhere(
            settings.advertise
        ):
            log.warning(
                "nobody on another machine reaches this worker: set --host or --advertise",
                advertise=settings.advertise,
                bootstrap=",".join(settings.bootstrap),
            )
        self._identity = identity
        self.channels = Channels.showing(identity, settings.run_token)
        self.server = Server(identity, settings.run_token)
        workers_pb2_grpc.add_PresenceServiceServicer_to_server(PresenceService(incarnation), self.server.grpc)
        try:
            self.port = self.server.bind(settings.host, settings.grpc_port)
        except OSError as error:
            raise cannot_listen(settings.host, settings.grpc_port, settings.grpc_port_flag) from error
        self._tracer = make_tracer(
            settings.otlp_endpoint,
            settings.trace_sample,
            f"baton-{settings.role}",
            settings.name,
            os.environ,
        )
        self._spans = RoomSpans(self._tracer, settings.role, SpanKind.SERVER)
        self.reporter = Reporter(
            lambda address: self.channels.to(address, ServiceRole.BOOTSTRAP),
            incarnation,
            settings.name,
            SystemClock(),
            self._spans,
            credential,
        )
        self._lease: LeaseThread | None = None

    @property
    def problem(self) -> str | None:
        """Reason for which the worker takes no new rooms, as text for its status pages. None if it takes
        them."""
        if self._lost is not None:
            return self._lost
        if self._lease is None:
            return STARTING
        if self._lease.problem is None and not self._lease.proven:
            return "no canary hand-over has passed through it yet"
        return self._lease.problem

    @property
    def missing(self) -> list[str]:
        """Bootstraps at which the worker has no lease, each with the reason, if it has a lease at another."""
        return [] if self._lease is None else [f"no lease at {each}" for each in self._lease.missing]

    def share_problems(self, other: "WorkerHost") -> None:
        """Make the status pages of both sides of one process show the problems of either side."""
        self._pages.share_problems(other._pages)

    async def start_pages(self, registry: CollectorRegistry, progress: Progress) -> None:
        """Serve /metrics, /started, /health and /ready from now on."""
        self._progress = progress
        await self._pages.start(registry, lambda: self.problem, progress, lambda: self.missing)
        log.info(
            "listening",
            worker=self._settings.name,
            grpc_port=self.port,
            metrics_port=self._pages.port,
            pid=os.getpid(),
        )

    async def serve(self, role: Role, shutdown: asyncio.Event) -> int:
        """Serve until `shutdown` is set and all rooms have ended. Return the exit code.

        Raises the error that ended the turns or a helper. The streams of all rooms then break at once. If
        the group broke, or the worker was declared gone, it does not return: the process ends.
        """
        progress = self._progress
        if progress is None:
            raise AssertionError("start_pages comes first")
        lease = LeaseThread(
            BootstrapAddresses(self._settings.bootstrap),
            Channels.showing(self._identity, self._settings.run_token, open_thread_channel),
            self._registration(role),
            self._departed,
            role.on_renewal,
            role.holds,
            lambda: progress.turn,
            self._use_routers,
        )
        self._lease = lease
        role.on_orphan(lease.renew_now)
        role.watch_leases(lambda: lease.census)
        self.reporter.load = role.load
        freeze_loaded_objects()
        await self.server.start((*role.services, PRESENCE))
        await self.server.set_serving(serving=True)
        turns = asyncio.create_task(role.turns, name="turns")
        helpers = [asyncio.create_task(lease.run()), asyncio.create_task(self.reporter.run())]
        stopping = asyncio.create_task(shutdown.wait())
        try:
            await asyncio.wait({turns, stopping, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            _raise_if_failed(turns, *helpers)
            timeout_ms = self._settings.drain_timeout_ms
            work = asyncio.create_task(drain(lease, turns, self.mailbox, self.reporter, timeout_ms))
            helpers.append(work)
            while not work.done():
                running = {each for each in helpers if not each.done()}
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                _raise_if_failed(*helpers)
            return 0 if turns.done() else 1
        except Exception as error:
            for helper in helpers:
                helper.cancel()
            await self._end_early(role, lease, turns, error)
            raise
        finally:
            for task in (turns, stopping, *helpers):
                task.cancel()
            await asyncio.gather(turns, stopping, *helpers, return_exceptions=True)
            await lease.stop()

    def _registration(self, role: Role) -> workers_pb2.RegisterRequest:
        registration = workers_pb2.RegisterRequest()
        registration.CopyFrom(role.registration)
        registration.worker.MergeFrom(
            rooms_pb2.Peer(
                name=self._settings.name,
                incarnation=self.incarnation,
                address=join_address(self._settings.advertise, self.port),
            )
        )
        registration.pid = os.getpid()
        registration.credential = self._credential
        registration.exit_digest = bytes.fromhex(self._settings.exit_digest)
        return registration

    async def _end_early(
        self, role: Role, lease: LeaseThread, turns: asyncio.Task[None], error: Exception
    ) -> None:
        """Send the callers of all rooms the error that ended the worker. Does not return if the group broke,
        or the worker was declared gone."""
        lost = LOST[Side(self._settings.role)]
        if isinstance(error, DeclaredGone):
            turns.cancel()  # its writes could reach memory of another owner
            self._lost = f"{self._settings.name} was declared gone while it lives"
            await self._break_off(role, lost)
            end_now(ReportedGone(f"{self._lost}: {TAKEN_FOR_GONE}"))
        if isinstance(error, role.broken):
            self._lost = f"{self._settings.name}: {error}"
            log.error("the group broke", cause=self._lost)
            await self._last_word(lease)
            await self._break_off(role, Reason.GROUP_BROKEN)
            end_now(GroupLost(self._lost))
        self._lost = f"{self._settings.name} ends: {error}"
        log.error("the worker ends", cause=f"{type(error).__name__}: {error}")
        await self._last_word(lease)
        await self._break_off(role, lost)

    async def close(self) -> None:
        """Break open streams, and stop the gRPC server, the tracer, the channels and the status pages."""
        self._spans.cut_off(Cause(Reason.DRAINING, f"{self._settings.role} worker ended before the room did"))
        await asyncio.gather(self.server.stop(STOP_GRACE_S), self._tracer.stop(SPANS_S))
        await self.channels.close()
        await self._pages.stop()

    async def _last_word(self, lease: LeaseThread) -> None:
        """Report to the bootstraps that this worker ends because of an error, so that they open no more rooms
        here. New requests wait for the worker's next process."""
        await self.server.set_serving(serving=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await lease.drain(broken=True)

    async def _break_off(self, role: Role, reason: Reason) -> None:
        """Send the cause as the last reply to the callers of all rooms, and stop the server."""
        cause = Cause(reason, f"{self._settings.role} worker {self._lost}")
        role.break_off(cause)
        self.mailbox.fail(Draining(cause.text))
        self._spans.cut_off(cause)
        await asyncio.gather(self.server.stop(LAST_REPLIES_S), self._tracer.stop(LAST_REPLIES_S))

    def _use_routers(self, routers: Mapping[Opener, str], gone: Sequence[Opener]) -> None:
        """Let all ranks report to these bootstraps, from one turn on."""
        is_only_one = self._lease is not None and self._lease.census[1] == 1
        message = routers_to_wire(routers, gone, is_only_one=is_only_one)
        self.mailbox.put(group_pb2.Command(bootstraps=message))

    def _departed(self, incarnations: Sequence[Incarnation]) -> None:
        for incarnation in incarnations:
            self.mailbox.put(group_pb2.Command(departed=incarnation))


async def drain(
    lease: BootstrapLeases | LeaseThread,
    turns: asyncio.Task[None],
    mailbox: Mailbox,
    reporter: Reporter,
    timeout_ms: int,
) -> None:
    """Drain the worker: ask for no more rooms, finish open ones, and leave (`drain-keeps-promises`).

    Rooms that a bootstrap opened before it knew of the drain may still be on their way. So this worker
    refuses rooms only when no bootstrap waits for any. Raises the error that ended the turns.
    """
    log.info("draining")
    loop = asyncio.get_running_loop()
    ends = loop.time() + timeout_ms / 1000
    while await lease.drain() and loop.time() < ends and not turns.done():
        await asyncio.wait({turns}, timeout=DRAIN_ASK_S)
    mailbox.put(group_pb2.Command(drain=True))
    await asyncio.wait({turns}, timeout=max(ends - loop.time(), 0))
    _raise_if_failed(turns)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            await reporter.flush()
    _raise_if_failed(turns)
    if turns.done():
        await lease.leave()
    else:
        # No goodbye: for peers it would prove that no write of this process is under way.
        log.warning("rooms were cut off: the drain timeout passed")


def _raise_if_failed(*tasks: asyncio.Task[None]) -> None:
    """Raise the error of the first of these tasks that has failed."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
