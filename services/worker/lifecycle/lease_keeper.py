"""Keeper of a worker's lease at one bootstrap, which also learns which peers are gone.

It registers, and renews after each third of the lease. It registers again when the bootstrap does not know
the worker any more or has been silent, with the prefill weight that its process had last. A renewal is sent
in time even if earlier ones are not answered. A refusal is logged once, and tried again with growing pauses,
so that the worker keeps running until it is fixed. Only a worker that was declared gone ends.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc

from baton.ids import NO_OPENER, Incarnation, Opener
from baton.rooms.errors import DeclaredGone
from baton.runtime.logging import Log
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.channel import UNARY_S
from baton.wire.errors import RemoteError, remote_error

log = Log(__name__)

RETRY_MIN_S: Final = 0.2
RETRY_MAX_S: Final = 2.0
UNREACHABLE_TRIES: Final = 5
"""Number of attempts without an answer after which a warning is logged, once. They take about three
seconds."""
LEASE_MS_MIN: Final = 100
"""Shortest lease in milliseconds. With shorter ones the worker would do nothing but renew."""
ANSWER_LEASES: Final = 10
"""Longest wait for an answer of the bootstrap, as a multiple of the lease. It is far longer than a bootstrap
is busy, and bounds the number of renewals under way."""
LAST_CALL_S: Final = 1.0


class Stall:
    """Measurement of how long no turn of the worker has ended.

    Time in which the observer itself stood still does not count, because a paused machine is no stalled
    worker.
    """

    def __init__(self, turns: Callable[[], int]) -> None:
        """Start to observe. `turns`: returns the number of turns that have ended."""
        self._turns = turns
        self._seen: int | None = None
        self._looked_s = 0.0
        self._stalled_s = 0.0

    def look_ms(self, now_s: float, most_s: float) -> int:
        """Return for how many milliseconds no turn has ended.

        Call it regularly: of the time between two calls, at most `most_s` seconds count. `now_s`: present
        time in seconds.
        """
        turns = self._turns()
        if turns == self._seen:
            self._stalled_s += min(now_s - self._looked_s, most_s)
        else:
            self._stalled_s = 0.0
        self._seen, self._looked_s = turns, now_s
        return int(self._stalled_s * 1000)


class LeaseKeeper:
    """Task that registers the worker and renews its lease. Used from one event loop. Any thread may read
    `problem` and `proven`."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        registration: workers_pb2.RegisterRequest,
        on_departed: Callable[[Sequence[Incarnation]], None],
        on_renewal: Callable[[bool], None],
        holds: Callable[[Opener], workers_pb2.RenewRequest] = lambda _: workers_pb2.RenewRequest(),
        turns: Callable[[], int] | None = None,
        on_opener: Callable[[Opener, Opener], None] = lambda _before, _now: None,
    ) -> None:
        """Make a keeper without a lease.

        `on_departed`: called with the incarnations of workers that are gone. `on_renewal`: called for each
        attempt, with whether the worker has a lease. `holds`: returns the census and load sent with it, for
        the bootstrap with this opener. `turns`: returns the number of ended turns, or None for a worker
        without turns. `on_opener`: called with the former and the new opener when another bootstrap answers.
        """
        self._stub = workers_pb2_grpc.WorkerRegistryStub(channel)
        self._registration = workers_pb2.RegisterRequest()
        self._registration.CopyFrom(registration)
        self._incarnation = registration.worker.incarnation
        self._credential = registration.credential
        self._on_departed = on_departed
        self._on_renewal = on_renewal
        self._what_it_holds = holds
        self._on_opener = on_opener
        self.opener = NO_OPENER
        """Id of the bootstrap's process that answered last, as the opener of rooms."""
        self.is_known = False
        """Whether a bootstrap has answered yet."""
        self._early = asyncio.Event()
        """Set if the next renewal is wanted before it is due."""
        self._stall = None if turns is None else Stall(turns)
        self._departed: set[Incarnation] = set()
        self._lease_ms = 3_000
        self._sent = self._confirmed = 0
        """Number of renewals sent so far. `_confirmed`: number of the latest renewal that was answered."""
        self._leased_s = 0.0
        """Time at which the request for the present lease was sent, in seconds of the event loop's clock. The
        lease counts from then."""
        self._failures = 0
        """Number of calls to the bootstrap that failed in a row."""
        self._pause_s = RETRY_MIN_S
        self._refusal: tuple[str, str] | None = None
        """Error kind and field name of the bootstrap's last refusal that was logged, or None. An equal
        refusal is not logged again."""
        self._draining = self._broken = self._left = False
        self.problem: str | None = "not registered yet"
        """Reason for which the worker has no lease, as text. None if it has one."""
        self.proven = False
        """Whether a canary (a small hand-over of the bootstrap's own) has passed through the worker. Only
        then the bootstrap sends it rooms."""

    def reach(self, channel: grpc.aio.Channel) -> None:
        """Use this channel to the bootstrap for all later calls, in place of the former one."""
        self._stub = workers_pb2_grpc.WorkerRegistryStub(channel)

    async def run(self) -> None:
        """Register, and renew the lease until cancelled, or until the worker has left. Raises DeclaredGone,
        after which the worker must end."""
        while not self._left:
            failed: RemoteError | None = None
            try:
                if self.problem is not None:
                    await self._register()
                await self._renew_on_and_on()
            except* RemoteError as errors:
                failed = _first(errors)
            if failed is not None:
                self._note_problem(failed)
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, RETRY_MAX_S)

    def renew_now(self) -> None:
        """Send the next renewal now, instead of when it is due."""
        self._early.set()

    async def drain(self, *, broken: bool = False) -> int:
        """Ask the bootstrap to open no more rooms on this worker. Return the number of open rooms for which
        the bootstrap still waits.

        Returns 0 if the bootstrap cannot be reached, because no room can come then. A bootstrap that restarts
        is asked again. `broken`: whether the worker ends because of an error, and is likely to be started
        again.
        """
        self._draining, self._broken = True, self._broken or broken
        request = workers_pb2.DrainRequest(
            incarnation=self._incarnation, credential=self._credential, broken=self._broken
        )
        reply = await self._call(self._stub.Drain, request)
        return 0 if reply is None else int(reply.rooms)

    async def leave(self) -> None:
        """Report to the bootstrap that this worker ends, if the bootstrap can be reached. No renewal
        follows."""
        self._left = True
        request = workers_pb2.LeaveRequest(incarnation=self._incarnation, credential=self._credential)
        await self._call(self._stub.Leave, request)

    async def _register(self) -> None:
        sent_s = asyncio.get_running_loop().time()
        request = workers_pb2.RegisterRequest(turn_ms=self._turn_ms())
        request.MergeFrom(self._registration)
        reply = await _typed(self._stub.Register(request, timeout=self._answer_s))
        self._holds(sent_s, reply.lease_ms)
        self._meet(Opener(reply.opener))
        log.info("registered at the bootstrap", lease_ms=reply.lease_ms)
        if self._draining:
            await self.drain()

    async def _renew_on_and_on(self) -> None:
        """Send a renewal after each third of the lease, until one is refused or cannot be sent.

        The first such error also ends the waits for other answers. Raises a group of RemoteErrors.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as renewals:
            while not self._left:
                unheard_s = loop.time() - self._leased_s
                if unheard_s * 1000 > self._lease_ms:
                    text = f"it has not answered for {unheard_s:.1f} s"
                    self._note_problem(RemoteError(grpc.StatusCode.DEADLINE_EXCEEDED, "", text))
                renewals.create_task(self._renew())
                self._early.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._lease_ms / 3000):
                        await self._early.wait()

    async def _renew(self) -> None:
        sent_s = asyncio.get_running_loop().time()
        self._sent += 1
        number = self._sent
        request = workers_pb2.RenewRequest(
            incarnation=self._incarnation, credential=self._credential, turn_ms=self._turn_ms()
        )
        request.MergeFrom(self._what_it_holds(self.opener))
        reply = await _typed(self._stub.Renew(request, timeout=self._answer_s))
        self._on_renewal(True)
        if number < self._confirmed:
            return  # a later renewal was answered before, with newer data
        self._confirmed = number
        self._holds(sent_s, reply.lease_ms)
        self._meet(Opener(reply.opener))
        self._failures = 0
        self._refusal = None
        self._pause_s = RETRY_MIN_S
        self.proven = not reply.unproven
        if reply.HasField("prefill_weight"):
            self._registration.other_side.prefill_weight = reply.prefill_weight
        departed = [Incarnation(each) for each in reply.departed]
        fresh = [each for each in departed if each not in self._departed]
        self._departed = set(departed)
        if fresh:
            self._on_departed(fresh)

    @property
    def _answer_s(self) -> float:
        return max(ANSWER_LEASES * self._lease_ms / 1000, UNARY_S)

    def _turn_ms(self) -> int:
        if self._stall is None:
            return 0
        return self._stall.look_ms(asyncio.get_running_loop().time(), 2 * self._lease_ms / 3000)

    def _holds(self, sent_s: float, lease_ms: int) -> None:
        self._leased_s = sent_s
        self._lease_ms = max(lease_ms, LEASE_MS_MIN)
        self.problem = None

    def _meet(self, opener: Opener) -> None:
        """Record which process of the bootstrap has answered. Another one than before is a new router, and
        has none of the former one's rooms."""
        if not self.is_known or opener != self.opener:
            before, self.opener, self.is_known = self.opener, opener, True
            self._on_opener(before, opener)

    def _note_problem(self, error: RemoteError) -> None:
        """Record why the worker has no lease. Raises DeclaredGone if the bootstrap declared the worker
        gone."""
        if self._left:
            return
        if error.kind == DeclaredGone.__name__:
            raise DeclaredGone(str(error)) from error
        self._on_renewal(False)
        self._failures += 1
        text = f"refused by the bootstrap: {error}" if error.kind else f"bootstrap unreachable: {error}"
        # A restart of the bootstrap, or its end before that of its workers, is not reported yet.
        refusal = (error.kind, error.field) if error.kind else None
        if self._failures == UNREACHABLE_TRIES if refusal is None else refusal != self._refusal:
            log.warning("no lease", cause=text)
        self._refusal = refusal or self._refusal
        self.problem = text

    async def _call(self, method: grpc.aio.UnaryUnaryMultiCallable, request: object) -> Any | None:
        try:
            return await _typed(method(request, timeout=LAST_CALL_S))
        except RemoteError as error:
            log.info("bootstrap not told", cause=str(error))
            return None


async def _typed(call: grpc.aio.UnaryUnaryCall) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        raise remote_error(error) from error


def _first(errors: BaseExceptionGroup[RemoteError]) -> RemoteError:
    """Return the first of these errors in which the bootstrap answered. If there is none, return the first
    error."""
    found = [each for each in errors.exceptions if isinstance(each, RemoteError)]
    return min(found, key=lambda each: each.unreachable)
