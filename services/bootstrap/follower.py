"""How does one request become one stream of tokens from two workers?

The prefill worker is called first; once it has accepted the room, the decode worker is. Both streams are
merged by token position: the first token is passed on from whichever side has it first, which is the
prefill side, so it does not wait for the hand-over. The first cause of a failure is the room's, and the
other side hears of it at once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc

from services.bootstrap.rooms import LOST, QueueFull, Rooms
from services.openai.backend import (
    Hangup,
    Limits,
    NoWorker,
    Overloaded,
    RoomFailed,
    TokenBatch,
)
from services.rooms.errors import Cause, NoSuchWorker, Reason
from services.rooms.phases import Side
from services.rooms.registry import RoomEntry
from services.rooms.request import FinishReason, Request, Token
from services.runtime.logging import Log
from services.wire.baton.v1 import inference_pb2, inference_pb2_grpc
from services.wire.channel import Channels
from services.wire.conversions import (
    Malformed,
    finish_from_wire,
    outcome_from_wire,
    peer_to_wire,
    request_to_wire,
    token_from_wire,
)
from services.wire.errors import remote_error

LINGER_S: Final = 10.0
"""How long the streams of an ended room are read on for their outcomes before they are cut."""

RETRY_AFTER_S: Final = 1

log = Log(__name__)


class RoomStream:
    """One room being followed: a `services.openai.backend.TokenStream`."""

    def __init__(
        self, rooms: Rooms, channels: Channels, entry: RoomEntry, request: Request, timeout_s: float
    ) -> None:
        self.cached_tokens = 0
        self._rooms = rooms
        self._channels = channels
        self._entry = entry
        self._request = request
        self._timeout_s = timeout_s
        # At most a batch a token, and one error.
        self._out: asyncio.Queue[TokenBatch | RoomFailed] = asyncio.Queue(request.max_tokens + 1)
        self._next = 0
        self._over = False
        """The reader has got, or given up, all it will ever get."""
        self._accepted = asyncio.Event()
        self._holding: set[Side] = set()
        """Sides that may hold the room, and so will report it retired."""

    def start(self) -> None:
        self._rooms.follow(self._entry.id, self._failed_outside)
        self._rooms.spawn(self._follow())

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        while True:
            batch = await self._out.get()
            if isinstance(batch, RoomFailed):
                raise batch
            yield batch
            if batch.finish is not None:
                return

    async def hang_up(self, why: Hangup) -> None:
        if self._over:
            return
        self._end()
        match why:
            case Hangup.STOP_STRING:
                self._rooms.stop(self._entry.id)
            case Hangup.CLIENT_GONE:
                self._rooms.fail(self._entry.id, Cause(Reason.CLIENT_GONE, "the client hung up"))

    # ---- the two streams

    async def _follow(self) -> None:
        sides = [asyncio.create_task(self._read_prefill()), asyncio.create_task(self._read_decode())]
        try:
            await self._until_over(sides)
        finally:
            for reader in sides:
                reader.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
            self._fail_if_open(sides)
            for side in set(Side) - self._holding:
                self._rooms.side_retired(self._entry.id, side)

    def _fail_if_open(self, sides: list[asyncio.Task[None]]) -> None:
        """Whatever ended the streams: nobody waits for a room that nobody follows any more."""
        for reader in sides:
            if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
                log.error("a room's stream could not be followed", room=self._entry.id, error=error)
        self.fail(Cause(Reason.BOOTSTRAP_LOST, "the bootstrap could not follow the room to its end"))

    async def _until_over(self, sides: list[asyncio.Task[None]]) -> None:
        """Until both streams have ended; once the room is over they get LINGER_S for that."""
        running = set(sides)
        while running and not self._over:
            done, running = await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            if any(reader.cancelled() or reader.exception() is not None for reader in done):
                return
        if running:
            await asyncio.wait(running, timeout=LINGER_S)

    async def _read_prefill(self) -> None:
        facts = self._entry.prefill
        self._holding.add(Side.PREFILL)
        stub = inference_pb2_grpc.PrefillServiceStub(self._channels.to(facts.address))
        call = stub.RunRoom(
            inference_pb2.RunRoomRequest(
                room=self._entry.id,
                incarnation=facts.incarnation,
                decode=peer_to_wire(self._entry.decode),
                request=request_to_wire(self._request),
            ),
            timeout=self._timeout_s,
        )
        async with _ended_with_outcome(self, Side.PREFILL) as outcome, _cut_off(call):
            async for reply in call:
                match reply.WhichOneof("what"):
                    case "accepted":
                        self._accepted.set()
                    case "first_token":
                        first = reply.first_token
                        self.cached_tokens = first.cached_tokens
                        self._offer(0, (token_from_wire(first.token),), finish_from_wire(first.finish))
                    case "outcome":
                        outcome.came(outcome_from_wire(reply.outcome))
                        if not self._accepted.is_set():
                            raise Malformed("an outcome before the room was accepted")

    async def _read_decode(self) -> None:
        await self._accepted.wait()
        if self._over:
            return
        facts = self._entry.decode
        self._holding.add(Side.DECODE)
        stub = inference_pb2_grpc.DecodeServiceStub(self._channels.to(facts.address))
        call = stub.StreamRoom(
            inference_pb2.StreamRoomRequest(
                room=self._entry.id,
                incarnation=facts.incarnation,
                prefill=peer_to_wire(self._entry.prefill),
                request=request_to_wire(self._request),
            ),
            timeout=self._timeout_s,
        )
        async with _ended_with_outcome(self, Side.DECODE) as outcome, _cut_off(call):
            async for reply in call:
                match reply.WhichOneof("what"):
                    case "tokens":
                        tokens = tuple(token_from_wire(each) for each in reply.tokens.tokens)
                        self._offer(reply.tokens.first, tokens, finish_from_wire(reply.tokens.finish))
                    case "outcome":
                        outcome.came(outcome_from_wire(reply.outcome))

    # ---- merging

    def _offer(self, first: int, tokens: tuple[Token, ...], finish: FinishReason | None) -> None:
        """Pass on output tokens [first, first + n) that were not passed on yet."""
        if self._over:
            return
        fresh = tokens[self._next - first :] if first <= self._next else None
        if fresh is None:
            self.fail(Cause(Reason.DECODE_LOST, f"tokens {self._next} to {first} are missing"))
            return
        if not fresh:
            return
        if self._next == 0:
            self._rooms.registry.streaming(self._entry.id)
            self._rooms.tell(self._entry.id, "first token passed on")
        self._next += len(fresh)
        if self._next > self._request.max_tokens:
            self.fail(Cause(LOST[Side.DECODE], f"decode worker {self._entry.decode.name} drew on"))
            return
        if finish is not None:
            self._end()
            self._rooms.answered(self._entry.id)
        self._out.put_nowait(TokenBatch(fresh, finish))

    def fail(self, cause: Cause) -> None:
        """One of the streams broke or told of a failure."""
        if self._over:
            return
        self._rooms.fail(self._entry.id, cause)

    def _failed_outside(self, cause: Cause) -> None:
        if not self._over:
            self._end()
            self._out.put_nowait(RoomFailed(cause.text, cause.reason.value))

    def _end(self) -> None:
        self._over = True
        self._accepted.set()  # a decode side that was not called yet need not be

    def broken(self, side: Side, error: grpc.aio.AioRpcError) -> Cause:
        """What a broken stream says of its room. A worker that cannot be reached gets no rooms until it
        renews its lease."""
        remote = remote_error(error)
        facts = self._entry.worker(side)
        if not remote.unreachable:
            self._holding.discard(side)
            return Cause(Reason.REFUSED, f"{side.value} worker {facts.name}: {remote}")
        if remote.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Cause(Reason.DEADLINE, f"{side.value} worker {facts.name} did not end the room in time")
        self._rooms.registry.suspect(facts.incarnation)
        return Cause(LOST[side], f"{side.value} worker {facts.name} broke off: {remote}")

    def note_outcome(self, side: Side, cause: Cause | None) -> None:
        text = "answered" if cause is None else f"{cause.reason.value}: {cause.text}"
        self._rooms.tell(self._entry.id, f"{side.value} outcome", text)


class _ended_with_outcome:  # noqa: N801 - reads as what it is: a context
    """One side's stream must end with an outcome; whatever else ends it fails the room."""

    def __init__(self, stream: RoomStream, side: Side) -> None:
        self._stream = stream
        self._side = side
        self._came = False

    def came(self, cause: Cause | None) -> None:
        self._came = True
        self._stream.note_outcome(self._side, cause)
        if cause is None and self._side is Side.DECODE:
            cause = Cause(Reason.DECODE_LOST, "decode worker ended the room before its answer was complete")
        if cause is not None:
            self._stream.fail(cause)

    async def __aenter__(self) -> "_ended_with_outcome":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        if isinstance(error, grpc.aio.AioRpcError):
            self._stream.fail(self._stream.broken(self._side, error))
            return True
        if isinstance(error, Malformed):
            self._stream.fail(Cause(LOST[self._side], f"{self._side.value} worker sent nonsense: {error}"))
            return True
        if error is None and not self._came:
            self._stream.fail(Cause(LOST[self._side], f"{self._side.value} worker ended without an outcome"))
        return False


@asynccontextmanager
async def _cut_off(call: grpc.aio.UnaryStreamCall) -> AsyncIterator[None]:
    """A reader that is cancelled ends its call, too: grpc alone leaves some running, so that the worker
    never hears of it."""
    try:
        yield
    finally:
        call.cancel()


class RoomBackend:
    """The API's backend: admission, a room, and its stream."""

    def __init__(self, rooms: Rooms, channels: Channels, context_tokens: int, timeout_s: float) -> None:
        self._rooms = rooms
        self._channels = channels
        self._context_tokens = context_tokens
        self._timeout_s = timeout_s

    def limits(self) -> Limits:
        workers = [worker.facts for worker in self._rooms.registry.workers()]
        largest = {
            side: max((facts.tokens_max for facts in workers if facts.side is side), default=0)
            for side in Side
        }
        return Limits(self._context_tokens, largest[Side.PREFILL], largest[Side.DECODE])

    async def generate(self, request: Request) -> RoomStream:
        try:
            entry = await self._rooms.admit(request.request_id, len(request.prompt), request.tokens_max)
        except NoSuchWorker as error:
            raise NoWorker(str(error)) from error
        except (QueueFull, TimeoutError) as error:
            raise Overloaded("every worker is busy and the queue is full", RETRY_AFTER_S) from error
        return self.follow(entry, request)

    def follow(self, entry: RoomEntry, request: Request) -> RoomStream:
        """Drive an opened room."""
        stream = RoomStream(self._rooms, self._channels, entry, request, self._timeout_s)
        stream.start()
        return stream
