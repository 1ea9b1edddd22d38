"""How does a worker get its lease, keep it, and learn which peers are gone?

The keeper registers, renews at a third of the lease, and registers again when the bootstrap does not
know it any more (it restarted) or has been silent: by the weight that its process was chosen by last. It
renews whether or not the renewals before were answered: one that waits, here or there, keeps no other from
being sent in time. A refusal is said once, clearly, and tried again with growing pauses: the worker keeps
running to be fixed. Only one that was declared gone ends.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from baton.ids import Incarnation
from baton.rooms.errors import DeclaredGone
from baton.runtime.logging import Log
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.channel import UNARY_S
from baton.wire.errors import RemoteError, remote_error

log = Log(__name__)

RETRY_MIN_S: Final = 0.2
RETRY_MAX_S: Final = 2.0
UNREACHABLE_TRIES: Final = 5
"""About three seconds."""
LEASE_MS_MIN: Final = 100
"""Below it renewing would be all that the worker does."""
ANSWER_LEASES: Final = 10
"""How long an answer is waited for: far longer than a bootstrap is busy. It bounds how many renewals may be
under way, too."""
LAST_CALL_S: Final = 1.0


class Stall:
    """For how long has one turn been watched not to end? What the watcher did not see, because it stood still
    itself, does not count: a paused machine is not a stalled worker."""

    def __init__(self, turns: Callable[[], int]) -> None:
        """`turns`: how many have ended."""
        self._turns = turns
        self._seen: int | None = None
        self._looked_s = 0.0
        self._stalled_s = 0.0

    def look_ms(self, now_s: float, most_s: float) -> int:
        """Milliseconds. To be asked every now and then: of the time since the last look `most_s` counts."""
        turns = self._turns()
        if turns == self._seen:
            self._stalled_s += min(now_s - self._looked_s, most_s)
        else:
            self._stalled_s = 0.0
        self._seen, self._looked_s = turns, now_s
        return int(self._stalled_s * 1000)


class LeaseKeeper:
    """Used from one event loop, runs as one task. `problem` and `proven` are for health pages, and may be
    read from anywhere."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        registration: workers_pb2.RegisterRequest,
        on_departed: Callable[[Sequence[Incarnation]], None],
        on_renewal: Callable[[bool], None],
        holds: Callable[[], workers_pb2.RenewRequest] = workers_pb2.RenewRequest,
        turns: Callable[[], int] | None = None,
    ) -> None:
        """`on_renewal`: told of each try, and whether the worker holds a lease by it. `holds`: what is told
        with it of what the worker holds. `turns`: how many of the worker's have ended; None for what takes
        none."""
        self._stub = workers_pb2_grpc.WorkerRegistryStub(channel)
        self._registration = workers_pb2.RegisterRequest()
        self._registration.CopyFrom(registration)
        self._incarnation = registration.worker.incarnation
        self._credential = registration.credential
        self._on_departed = on_departed
        self._on_renewal = on_renewal
        self._what_it_holds = holds
        self._stall = None if turns is None else Stall(turns)
        self._departed: set[Incarnation] = set()
        self._lease_ms = 3_000
        self._sent = self._heard = 0
        """Renewals sent so far, and the latest of them that was answered."""
        self._held_s = 0.0
        """When the latest call was sent by whose answer the worker holds its lease."""
        self._failures = 0
        """Calls in a row that did not succeed."""
        self._pause_s = RETRY_MIN_S
        self._refusal: tuple[str, str] | None = None
        """Kind and field of the refusal that was told last."""
        self._draining = self._broken = self._left = False
        self.problem: str | None = "not registered yet"
        """Why the worker holds no lease, or None while it does."""
        self.proven = False
        """The bootstrap's word: a canary hand-over has passed through the worker, so it may get rooms."""

    def reach(self, channel: grpc.aio.Channel) -> None:
        """By this channel from the next call on."""
        self._stub = workers_pb2_grpc.WorkerRegistryStub(channel)

    async def run(self) -> None:
        """Register and renew until cancelled, or until the worker has left. Raises DeclaredGone: the worker
        must end."""
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

    async def drain(self, *, broken: bool = False) -> int:
        """Ask for no more rooms. Returns how many of those that were opened here the bootstrap still waits
        for; 0 when it cannot be reached, since then none will come. One that comes back is asked again.
        `broken`: the worker ends, and is likely to be started again."""
        self._draining, self._broken = True, self._broken or broken
        request = workers_pb2.DrainRequest(
            incarnation=self._incarnation, credential=self._credential, broken=self._broken
        )
        reply = await self._call(self._stub.Drain, request)
        return 0 if reply is None else int(reply.rooms)

    async def leave(self) -> None:
        """The last word before exit. Best effort. Nothing is renewed from here on."""
        self._left = True
        request = workers_pb2.LeaveRequest(incarnation=self._incarnation, credential=self._credential)
        await self._call(self._stub.Leave, request)

    async def _register(self) -> None:
        sent_s = asyncio.get_running_loop().time()
        request = workers_pb2.RegisterRequest(turn_ms=self._turn_ms())
        request.MergeFrom(self._registration)
        reply = await _typed(self._stub.Register(request, timeout=self._answer_s))
        self._holds(sent_s, reply.lease_ms)
        log.info("registered at the bootstrap", lease_ms=reply.lease_ms)
        if self._draining:
            await self.drain()

    async def _renew_on_and_on(self) -> None:
        """At a third of the lease, until one is refused or cannot be sent, which ends those that wait for
        their answers, too. Raises a group of RemoteErrors."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as renewals:
            while not self._left:
                unheard_s = loop.time() - self._held_s
                if unheard_s * 1000 > self._lease_ms:
                    text = f"it has not answered for {unheard_s:.1f} s"
                    self._note_problem(RemoteError(grpc.StatusCode.DEADLINE_EXCEEDED, "", text))
                renewals.create_task(self._renew())
                await asyncio.sleep(self._lease_ms / 3000)

    async def _renew(self) -> None:
        sent_s = asyncio.get_running_loop().time()
        self._sent += 1
        number = self._sent
        request = workers_pb2.RenewRequest(
            incarnation=self._incarnation, credential=self._credential, turn_ms=self._turn_ms()
        )
        request.MergeFrom(self._what_it_holds())
        reply = await _typed(self._stub.Renew(request, timeout=self._answer_s))
        self._on_renewal(True)
        if number < self._heard:
            return  # a later one was answered before: it knew more
        self._heard = number
        self._holds(sent_s, reply.lease_ms)
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
        self._held_s = sent_s
        self._lease_ms = max(lease_ms, LEASE_MS_MIN)
        self.problem = None

    def _note_problem(self, error: RemoteError) -> None:
        """Raises DeclaredGone."""
        if self._left:
            return
        if error.kind == DeclaredGone.__name__:
            raise DeclaredGone(str(error)) from error
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
    """What the bootstrap itself said, if it said anything."""
    found = [each for each in errors.exceptions if isinstance(each, RemoteError)]
    return min(found, key=lambda each: each.unreachable)
