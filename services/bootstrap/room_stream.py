"""Stream of one room's tokens. It drives the room at its opener, `OpenedRoom`, which decides everything.

What is left here is the shell: messages of the two workers become values, requests of the room are carried
out, and its timers run on the event loop.
"""

import asyncio
from dataclasses import replace
from typing import Any, Final

import grpc

from baton.api.backend import Hangup, RoomFailed
from baton.bootstrap.outbox import Outbox
from baton.bootstrap.room_controller import RoomController
from baton.fleet.room_entry import RoomEntry
from baton.handover.adopted_room import AdoptedRoom
from baton.handover.opened_room import OpenedRoom
from baton.handover.opener_messages import (
    Accepted,
    Adopt,
    Break,
    CountPrompt,
    EndChoice,
    Fail,
    FailReader,
    FailRest,
    FirstToken,
    Leave,
    MarkAdopted,
    MarkAnswered,
    MarkFull,
    MarkLocal,
    MarkNotAdopted,
    MarkRetired,
    Open,
    OpenerRequest,
    RoomOutcome,
    RoomTimer,
    ScoreMessage,
    Stop,
    Stream,
    Suspect,
    TokenMessage,
    WorkerMessage,
)
from baton.handover.requests import Report, StartTimer, StopTimer
from baton.rooms.errors import Cause, Reason, RosterFull
from baton.rooms.phases import Side
from baton.rooms.request import Request, TokenBatch
from baton.rooms.timeline import Moment
from baton.runtime.logging import Log
from baton.runtime.timers import Timers
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import (
    Malformed,
    finish_from_wire,
    outcome_from_wire,
    peer_to_wire,
    request_to_wire,
    scores_from_wire,
    token_from_wire,
    tokens_from_wire,
)
from baton.wire.errors import Draining, RemoteError, WrongIncarnation
from baton.wire.load_messages import Orphan

SIBLING_FAILED: Final = "another part of the request failed"
GIVEN_UP: Final = {
    Hangup.CLIENT_GONE: Cause(Reason.CLIENT_GONE, "the client hung up"),
    Hangup.REQUEST_FAILED: Cause(Reason.CANCELLED, SIBLING_FAILED),
}
"""Cause of a room whose reader reads no more before its end."""

REFUSALS: Final = {
    WrongIncarnation.__name__: Break.REPLACED,
    Draining.__name__: Break.DRAINING,
    RosterFull.__name__: Break.FULL,
}
"""Meaning of a worker's refusal, by the class name of its error. Any other concerns the room alone."""

FIRST_ACCEPTED: Final = Accepted()

log = Log(__name__)


class RoomStream:
    """Stream of one room's tokens. It is a `baton.api.backend.TokenStream` for its reader, and a
    `baton.bootstrap.worker_streams.RoomListener` for the streams of both workers."""

    def __init__(
        self,
        rooms: RoomController,
        entry: RoomEntry,
        request: Request,
        timeout_s: float,
        orphan: Orphan | None = None,
    ) -> None:
        """Make the stream of a room. `orphan`: the room as its decode worker reported it, if another router
        opened it and this one adopts it. None for a room of this router."""
        self.entry = entry
        self._orphan = orphan
        self._adopted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._rooms = rooms
        trace = rooms.timelines.spans.trace_of(entry.id)
        self._request = request if trace is None else replace(request, trace=trace)
        self._wire: inference_pb2.InferenceRequest | None = None
        """Request as a protobuf message for both workers, made once."""
        self._timeout_s = timeout_s
        # At most one batch for each token, and one error.
        self._out: Outbox[TokenBatch | RoomFailed] = Outbox(request.choices * request.max_tokens + 1)
        made = OpenedRoom if orphan is None else AdoptedRoom
        self._room: OpenedRoom = made(entry.id, request, entry.names, timeout_s)
        self._timers: Timers[RoomTimer] = Timers()

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens whose KV was taken from a prefix cache. Known after the first batch."""
        return self._room.cached_tokens

    @property
    def cause(self) -> Cause | None:
        """Cause for which the room failed; None while it has not."""
        return self._room.cause

    @property
    def reporter(self) -> Side | None:
        """Side (prefill or decode) whose worker reported the room's failure. None if neither did."""
        return self._room.reporter

    def start(self) -> None:
        self._rooms.follow(self.entry.id, self._end)
        self._room.start()
        self._carry_out()

    async def adopted(self, within_s: float) -> bool:
        """Wait until the decode worker has given the room to this router, or refused. Return whether the room
        is this router's. `within_s`: longest wait in seconds."""
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(self._adopted)
        except TimeoutError:
            if isinstance(self._room, AdoptedRoom):
                self._room.stop_adopting(f"the decode worker did not answer within {within_s:g} s")
            self._carry_out()
            return self._adopted.result()

    async def next(self) -> TokenBatch:
        batch = await self._out.get()
        if isinstance(batch, RoomFailed):
            raise batch
        return batch

    def end_choice(self, choice: int) -> None:
        """Pass no more tokens of one choice on to the reader, and let decode sample no more of them. The room
        ends with its last choice."""
        self._room.end_choice(choice)
        self._carry_out()

    async def hang_up(self, why: Hangup) -> None:
        if why is Hangup.STOP_STRING:
            self._room.stop()
        else:
            self._room.give_up(GIVEN_UP[why])
        self._carry_out()

    # ---- what comes

    def on_reply(self, side: Side, reply: Any) -> None:
        """Process a message about the room that came from its worker on one side."""
        batch = None
        try:
            message = _message_from_wire(reply)
            if message is not None:
                batch = self._room.receive(side, message)
        except Malformed as error:
            self._room.malformed(side, str(error))
        except Exception as error:
            self._abandon(error)
        if batch is None:
            self._carry_out()
        else:
            self._out.put(batch)

    def on_broken(self, side: Side, error: RemoteError) -> None:
        """Process the error of the worker on one side: it refused the room, or its stream broke."""
        self._room.broken(side, _break_of(error), str(error))
        self._carry_out()

    def _end(self, cause: Cause) -> None:
        self._room.end(cause)
        self._carry_out()

    def _passed(self, timer: RoomTimer) -> None:
        self._room.passed(timer)
        self._carry_out()

    def _abandon(self, error: Exception) -> None:
        log.error("a room could not be followed", room=self.entry.id, error=error)
        self._room.abandon()

    # ---- what the room requests

    def _carry_out(self) -> None:
        """Carry out the room's requests. A nested call carries out what the present request caused."""
        for request in self._room.take_requests():
            self._do(request)

    def _do(self, request: OpenerRequest) -> None:
        """Carry out a request. Those that every room makes come first. Their patterns bind no fields, because
        that costs several times as much."""
        match request:
            case TokenBatch():
                self._out.put(request)
            case Report():
                self._rooms.timelines.report(self.entry.id, request.moment, request.detail)
            case StopTimer():
                self._timers.stop(request.timer)
            case StartTimer():
                self._timers.start(request.timer, request.after_s, self._passed)
            case Open():
                self._open(request.side)
            case Stream():
                self._rooms.registry.mark_streaming(self.entry.id)
                self._rooms.timelines.report(self.entry.id, Moment.FIRST_TOKEN_PASSED_ON)
            case CountPrompt():
                self._rooms.computed(self.entry, request.side, request.tokens)
            case MarkAnswered():
                self._rooms.answered(self.entry.id, request.detail)
            case _:
                self._do_rare(request)

    def _do_rare(self, request: OpenerRequest) -> None:
        """Carry out a request of a room that is local, ends early, or loses a worker."""
        rooms, room = self._rooms, self.entry.id
        match request:
            case Adopt() | MarkAdopted() | MarkNotAdopted():
                self._do_adoption(request)
            case Leave(side, cause):
                rooms.streams.to(self.entry.worker(side)).leave(room, cause)
            case EndChoice(choice):
                rooms.streams.to(self.entry.decode).end_choice(room, choice)
            case FailReader(cause):
                self._out.put(RoomFailed(cause.text, cause.reason))
            case MarkLocal():
                rooms.registry.mark_local(room)
            case Suspect(side):
                rooms.registry.suspect(self.entry.worker(side).incarnation)
            case MarkFull(side):
                rooms.registry.mark_full(self.entry.worker(side).incarnation)
            case Stop():
                rooms.stop(room)
            case Fail(cause):
                rooms.fail(room, cause)
            case FailRest(cause):
                rooms.send_end(self.entry, cause)
            case MarkRetired(side):
                rooms.side_retired(room, side)

    def _do_adoption(self, request: Adopt | MarkAdopted | MarkNotAdopted) -> None:
        rooms, room = self._rooms, self.entry.id
        match request:
            case Adopt(side, term):
                self._adopt(side, term)
            case MarkAdopted():
                rooms.timelines.report(room, Moment.ADOPTED)
                self._adopted.set_result(True)
            case MarkNotAdopted(cause):
                rooms.not_adopted(room, cause)
                self._adopted.set_result(False)

    def _adopt(self, side: Side, term: int) -> None:
        worker, key = self.entry.worker(side), b"" if self._orphan is None else self._orphan.key
        request = inference_pb2.AdoptRequest(
            room=self.entry.id, incarnation=worker.incarnation, opener=self._rooms.opener, key=key, term=term
        )
        self._rooms.streams.to(worker).adopt(request, self)
        self._room.opened(side)
        self._carry_out()

    def _open(self, side: Side) -> None:
        try:
            request = self._opening(side)
            self._rooms.streams.to(self.entry.worker(side)).open(request, self)
        except Exception as error:
            self._abandon(error)
        else:
            self._room.opened(side)
        self._carry_out()

    def _opening(self, side: Side) -> inference_pb2.RunRoomRequest | inference_pb2.StreamRoomRequest:
        entry, incarnation = self.entry, self.entry.worker(side).incarnation
        opener = self._rooms.opener
        request = self._wire = self._wire or request_to_wire(self._request, self._timeout_s)
        if side is Side.PREFILL:
            decode = peer_to_wire(entry.decode)
            return inference_pb2.RunRoomRequest(
                room=entry.id, incarnation=incarnation, decode=decode, request=request, opener=opener
            )
        prefill = None if entry.prefill is None else peer_to_wire(entry.prefill)
        return inference_pb2.StreamRoomRequest(
            room=entry.id,
            incarnation=incarnation,
            prefill=prefill,
            request=request,
            prefill_ms=entry.prefill_ms,
            prefill_own_ms=entry.prefill_own_ms,
            opener=opener,
        )


def _message_from_wire(reply: Any) -> WorkerMessage | None:
    """Return a worker's message as a value, or None if its kind is unknown. Raises Malformed."""
    match reply.WhichOneof("what"):
        case "tokens":
            part = reply.tokens
            batch = TokenBatch(tokens_from_wire(part.tokens), finish_from_wire(part.finish), part.choice)
            return TokenMessage(batch, part.first, part.cached_tokens, part.local)
        case "first_token":
            first = reply.first_token
            return FirstToken(
                token_from_wire(first.token), finish_from_wire(first.finish), first.cached_tokens
            )
        case "scores":
            return ScoreMessage(reply.scores.first, scores_from_wire(reply.scores))
        case "outcome":
            return RoomOutcome(outcome_from_wire(reply.outcome))
        case "accepted":
            term = reply.accepted.term
            return Accepted(term) if term else FIRST_ACCEPTED
        case _:
            return None


def _break_of(error: RemoteError) -> Break:
    """Return the way in which a worker's stream ended."""
    if not error.unreachable:
        return REFUSALS.get(error.kind, Break.REFUSED)
    return Break.CLOSED if error.code is grpc.StatusCode.OK else Break.LOST
