"""How does one room become one stream of tokens from two workers?

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

from services.bootstrap.rooms import LOST, Rooms
from services.openai.backend import Hangup, RoomFailed, TokenBatch
from services.rooms.errors import Cause, Reason
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
from services.wire.errors import WrongIncarnation, remote_error

LINGER_S: Final = 10.0
"""How long the streams of an ended room are read on for their outcomes before they are cut."""

log = Log(__name__)


class RoomStream:
    """One room being followed: a `services.openai.backend.TokenStream`."""

    def __init__(
        self, rooms: Rooms, channels: Channels, entry: RoomEntry, request: Request, timeout_s: float
    ) -> None:
        self.cached_tokens = 0
        self.cause: Cause | None = None
        """Why the room failed, once it has."""
        self.teller: Side | None = None
        """The side that told of it, if one did."""
        self._rooms = rooms
        self._channels = channels
        self.entry = entry
        self._request = request
        self._timeout_s = timeout_s
        self._given = len(request.output)
        # At most a batch a token, and one error.
        self._out: asyncio.Queue[TokenBatch | RoomFailed] = asyncio.Queue(request.max_tokens + 1)
        self._next = self._given
        """Position, in the request's output, of the token that is passed on next."""
        self._over = False
        self._accepted = asyncio.Event()
        self._holding: set[Side] = set()
        """Sides that may hold the room, and so will report it retired."""

    def start(self) -> None:
        self._rooms.follow(self.entry.id, self._failed_outside)
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
                self._rooms.stop(self.entry.id)
            case Hangup.CLIENT_GONE:
                self._rooms.fail(self.entry.id, Cause(Reason.CLIENT_GONE, "the client hung up"))

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
            for side in [each for each in Side if each not in self._holding]:
                self._rooms.side_retired(self.entry.id, side)

    def _fail_if_open(self, sides: list[asyncio.Task[None]]) -> None:
        """Whatever ended the streams: nobody waits for a room that nobody follows any more."""
        for reader in sides:
            if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
                log.error("a room's stream could not be followed", room=self.entry.id, error=error)
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
        if self._over:
            return  # it failed before anyone was called
        facts = self.entry.prefill
        self._holding.add(Side.PREFILL)
        stub = inference_pb2_grpc.PrefillServiceStub(self._channels.to(facts.address))
        call = stub.RunRoom(
            inference_pb2.RunRoomRequest(
                room=self.entry.id,
                incarnation=facts.incarnation,
                decode=peer_to_wire(self.entry.decode),
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
                        self._offer(
                            self._given, (token_from_wire(first.token),), finish_from_wire(first.finish)
                        )
                    case "outcome":
                        outcome.came(outcome_from_wire(reply.outcome))
                        if not self._accepted.is_set():
                            raise Malformed("an outcome before the room was accepted")

    async def _read_decode(self) -> None:
        await self._accepted.wait()
        if self._over:
            return
        facts = self.entry.decode
        self._holding.add(Side.DECODE)
        stub = inference_pb2_grpc.DecodeServiceStub(self._channels.to(facts.address))
        call = stub.StreamRoom(
            inference_pb2.StreamRoomRequest(
                room=self.entry.id,
                incarnation=facts.incarnation,
                prefill=peer_to_wire(self.entry.prefill),
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
        """Pass on output tokens [first, first + n) that were not passed on yet, all of them or none."""
        if self._over:
            return
        fresh = tokens[self._next - first :] if first <= self._next else None
        if fresh is None:
            text = f"tokens {self._next} to {first} are missing"
            self.fail(Cause(Reason.DECODE_LOST, text), Side.DECODE)
            return
        if not fresh:
            return
        left = self._request.max_tokens - self._next - len(fresh)
        if left < 0 or (left == 0 and finish is None):
            text = f"decode worker {self.entry.decode.name} drew on behind the last token"
            self.fail(Cause(LOST[Side.DECODE], text), Side.DECODE)
            return
        if self._next == self._given:
            self._rooms.registry.streaming(self.entry.id)
            self._rooms.tell(self.entry.id, "first token passed on")
        self._next += len(fresh)
        if finish is not None:
            self._end()
            self._rooms.answered(self.entry.id)
        self._out.put_nowait(TokenBatch(fresh, finish))

    def fail(self, cause: Cause, teller: Side | None = None) -> None:
        """One of the streams broke or told of a failure."""
        if self._over:
            if teller is not None:
                self._rooms.fail_rest(self.entry, cause)
            return
        self.teller = teller
        self._rooms.fail(self.entry.id, cause)

    @property
    def over(self) -> bool:
        """The reader has got, or given up, all it will ever get."""
        return self._over

    def _failed_outside(self, cause: Cause) -> None:
        if not self._over:
            self._end()
            self.cause = cause
            self._out.put_nowait(RoomFailed(cause.text, cause.reason.value))

    def _end(self) -> None:
        self._over = True
        self._accepted.set()  # a decode side that was not called yet need not be

    def broken(self, side: Side, error: grpc.aio.AioRpcError) -> Cause:
        """What a broken stream says of its room. A worker that cannot be reached gets no rooms until it
        renews its lease."""
        remote = remote_error(error)
        facts = self.entry.worker(side)
        if remote.kind == WrongIncarnation.__name__:
            self._holding.discard(side)
            self._rooms.registry.suspect(facts.incarnation)
            return Cause(LOST[side], f"{side.value} worker {facts.name} is another process now: {remote}")
        if not remote.unreachable:
            self._holding.discard(side)
            return Cause(Reason.REFUSED, f"{side.value} worker {facts.name}: {remote}")
        if remote.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Cause(Reason.DEADLINE, f"{side.value} worker {facts.name} did not end the room in time")
        self._rooms.registry.suspect(facts.incarnation)
        return Cause(LOST[side], f"{side.value} worker {facts.name} broke off: {remote}")

    def note_outcome(self, side: Side, cause: Cause | None) -> None:
        text = "answered" if cause is None else f"{cause.reason.value}: {cause.text}"
        self._rooms.tell(self.entry.id, f"{side.value} outcome", text)


class _ended_with_outcome:  # noqa: N801 - reads as what it is: a context
    """One side's stream must end with an outcome; whatever else ends it fails the room."""

    def __init__(self, stream: RoomStream, side: Side) -> None:
        self._stream = stream
        self._side = side
        self._came = False

    def came(self, cause: Cause | None) -> None:
        self._came = True
        self._stream.note_outcome(self._side, cause)
        if cause is None and self._side is Side.DECODE and not self._stream.over:
            cause = Cause(Reason.DECODE_LOST, "decode worker ended the room before its answer was complete")
        if cause is not None:
            self._stream.fail(cause, self._side)

    async def __aenter__(self) -> "_ended_with_outcome":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        if isinstance(error, grpc.aio.AioRpcError):
            self._stream.fail(self._stream.broken(self._side, error), self._side)
            return True
        if isinstance(error, Malformed):
            text = f"{self._side.value} worker sent nonsense: {error}"
            self._stream.fail(Cause(LOST[self._side], text), self._side)
            return True
        if error is None and not self._came:
            text = f"{self._side.value} worker ended without an outcome"
            self._stream.fail(Cause(LOST[self._side], text), self._side)
        return False


@asynccontextmanager
async def _cut_off(call: grpc.aio.UnaryStreamCall) -> AsyncIterator[None]:
    """A reader that is cancelled ends its call, too: grpc alone leaves some running, so that the worker
    never hears of it."""
    try:
        yield
    finally:
        call.cancel()
