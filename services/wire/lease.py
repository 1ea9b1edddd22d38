"""How does a worker get its lease, keep it, and learn which peers are gone?

The keeper registers, renews at a third of the lease, and registers again when the bootstrap does not
know it any more (it restarted) or has been silent. A refusal is said once, clearly, and tried again
with growing pauses: the worker keeps running to be fixed.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from services.rooms.ids import Incarnation
from services.runtime.logging import Log
from services.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from services.wire.channel import UNARY_S
from services.wire.errors import RemoteError, remote_error

log = Log(__name__)

RETRY_MIN_S = 0.2
RETRY_MAX_S = 2.0
UNREACHABLE_TRIES = 5
"""About three seconds."""
LEASE_MS_MIN = 100
"""Below it renewing would be all that the worker does."""


class LeaseKeeper:
    """Runs as one task. `problem` and `proven` are for health pages."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        registration: workers_pb2.RegisterRequest,
        on_departed: Callable[[Sequence[Incarnation]], None],
        on_renewal: Callable[[bool], None],
        census: Callable[[], workers_pb2.WorkerCensus] = workers_pb2.WorkerCensus,
    ) -> None:
        """`on_renewal`: told of each try, and whether the worker holds a lease by it. `census`: what is told
        with it of what the worker holds."""
        self._stub = workers_pb2_grpc.WorkerRegistryStub(channel)
        self._registration = registration
        self._incarnation = registration.worker.incarnation
        self._credential = registration.credential
        self._on_departed = on_departed
        self._on_renewal = on_renewal
        self._census = census
        self._departed: set[int] = set()
        self._lease_ms = 3_000
        self._failures = 0
        """Calls in a row that did not succeed."""
        self._refusal: tuple[str, str] | None = None
        """Kind and field of the refusal that was told last."""
        self._draining = False
        self.problem: str | None = "not registered yet"
        """Why the worker holds no lease, or None while it does."""
        self.proven = False
        """The bootstrap's word: a canary hand-over has passed through the worker, so it may get rooms."""

    def reach(self, channel: grpc.aio.Channel) -> None:
        """By this channel from the next call on."""
        self._stub = workers_pb2_grpc.WorkerRegistryStub(channel)

    async def run(self) -> None:
        """Register and renew until cancelled."""
        pause_s = RETRY_MIN_S
        while True:
            try:
                if self.problem is not None:
                    await self._register()
                await self._renew()
                self._failures = 0
                self._refusal = None
                pause_s = RETRY_MIN_S
                await asyncio.sleep(self._lease_ms / 3000)
            except RemoteError as error:
                self._note_problem(error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def drain(self) -> int:
        """Ask for no more rooms. Returns how many of those that were opened here the bootstrap still waits
        for; 0 when it cannot be reached, since then none will come. One that comes back is asked again."""
        self._draining = True
        request = workers_pb2.DrainRequest(incarnation=self._incarnation, credential=self._credential)
        reply = await self._call(self._stub.Drain, request)
        return 0 if reply is None else int(reply.rooms)

    async def leave(self) -> None:
        """The last word before exit. Best effort."""
        request = workers_pb2.LeaveRequest(incarnation=self._incarnation, credential=self._credential)
        await self._call(self._stub.Leave, request)

    async def _register(self) -> None:
        reply = await _typed(self._stub.Register(self._registration, timeout=UNARY_S))
        self._lease_ms = max(reply.lease_ms, LEASE_MS_MIN)
        self.problem = None
        log.info("registered at the bootstrap", lease_ms=reply.lease_ms)
        if self._draining:
            await self.drain()

    async def _renew(self) -> None:
        request = workers_pb2.RenewRequest(
            incarnation=self._incarnation, census=self._census(), credential=self._credential
        )
        reply = await _typed(self._stub.Renew(request, timeout=max(self._lease_ms / 3000, 0.5)))
        self._lease_ms = max(reply.lease_ms, LEASE_MS_MIN)
        self.proven = not reply.unproven
        self._on_renewal(True)
        fresh = [Incarnation(each) for each in reply.departed if each not in self._departed]
        self._departed = set(reply.departed)
        if fresh:
            self._on_departed(fresh)

    def _note_problem(self, error: RemoteError) -> None:
        self._on_renewal(False)
        self._failures += 1
        text = f"refused by the bootstrap: {error}" if error.kind else f"bootstrap unreachable: {error}"
        # A bootstrap that is being restarted, or that stops before its workers do, is no news yet.
        refusal = (error.kind, error.field) if error.kind else None
        if self._failures == UNREACHABLE_TRIES if refusal is None else refusal != self._refusal:
            log.warning("no lease", cause=text)
        self._refusal = refusal or self._refusal
        self.problem = text

    async def _call(self, method: grpc.aio.UnaryUnaryMultiCallable, request: object) -> Any | None:
        try:
            return await _typed(method(request, timeout=1.0))
        except RemoteError as error:
            log.info("bootstrap not told", cause=str(error))
            return None


async def _typed(call: grpc.aio.UnaryUnaryCall) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise remote_error(error) from error
