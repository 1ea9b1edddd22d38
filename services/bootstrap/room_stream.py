"""Stream of one room's tokens, merged from its two workers.

Both workers are called at once. Their tokens are merged by position. The first token is passed on from the
worker that sends it first. That is prefill, so the first token does not wait for the hand-over. If prefill
alone can report the log-probabilities of the first token, decode's tokens wait for it. The first cause of a
failure is the room's, and the other worker is informed at once. If prefill reports that decode closed the
room, decode's own cause is awaited.

A room is local if decode computes its prompt. Prefill reports that instead of a first token, or there was no
prefill worker. Then all tokens come from decode.

A room of several choices has a position for each. It is answered when each choice is complete, or its reader
wants no more of it.
"""

import asyncio
from dataclasses import replace
from typing import Any, Final

import grpc

from baton.api.backend import Hangup, RoomFailed, TokenBatch
from baton.bootstrap.outbox import Outbox
from baton.bootstrap.room_controller import ANSWERED, RoomController
from baton.bootstrap.token_merger import TokenMerger, TokenMessage, TokensLost
from baton.fleet.room_entry import RoomEntry
from baton.pages.record import ALTERNATIVES_MAX
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import LOST, REASONS
from baton.rooms.request import Request
from baton.rooms.timeline import Moment
from baton.runtime.logging import Log
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import (
    Malformed,
    finish_from_wire,
    outcome_from_wire,
    peer_to_wire,
    request_to_wire,
    scores_from_wire,
    token_from_wire,
)
from baton.wire.errors import Draining, RemoteError, WrongIncarnation

SIBLING_FAILED: Final = "another part of the request failed"
OUTCOMES: Final = {Side.PREFILL: Moment.PREFILL_OUTCOME, Side.DECODE: Moment.DECODE_OUTCOME}
LINGER_S: Final = 10.0
"""Longest time in seconds to wait for the outcomes of both workers after a room has ended."""
ROOT_S: Final = 1.0
"""Time for decode to report why it closed the room, after prefill reported the closing, in seconds. Decode
sends its tokens before that."""

log = Log(__name__)


class RoomStream:
    """Stream of one room's tokens. It is a `baton.api.backend.TokenStream` for its reader, and a
    `baton.bootstrap.worker_streams.RoomListener` for the streams of both workers."""

    def __init__(self, rooms: RoomController, entry: RoomEntry, request: Request, timeout_s: float) -> None:
        self.cached_tokens = 0
        self.cause: Cause | None = None
        """Cause for which the room failed; None while it has not."""
        self.reporter: Side | None = None
        """Side (prefill or decode) whose worker reported the room's failure. None if neither did."""
        self._rooms = rooms
        self.entry = entry
        trace = rooms.timelines.spans.trace_of(entry.id)
        self._request = request if trace is None else replace(request, trace=trace)
        self._wire: inference_pb2.InferenceRequest | None = None
        """Request as a protobuf message for both workers, made once."""
        self._timeout_s = timeout_s
        # At most one batch for each token, and one error.
        self._out: Outbox[TokenBatch | RoomFailed] = Outbox(request.choices * request.max_tokens + 1)
        self._merger = TokenMerger(
            request, entry.decode.name, awaits_prefill=not entry.is_local and _is_first_from_prefill(request)
        )
        self._streaming = False
        """Whether the first token was passed on to the reader."""
        self._counted = False
        """Whether the room's prompt was already counted in the metrics as computed."""
        self._accepted = False
        """Whether the prefill worker has accepted the room."""
        self._open_sides: set[Side] = set()
        """Sides (prefill, decode) from whose workers more messages about the room may come."""
        self._holding: set[Side] = set()
        """Sides (prefill, decode) whose workers may have the room, and so will report it retired."""
        self._timer: asyncio.TimerHandle | None = None
        self._echo: asyncio.TimerHandle | None = None
        """Timer that runs while decode's cause is awaited, after prefill reported that decode closed the
        room."""

    def start(self) -> None:
        self._rooms.follow(self.entry.id, self._failed_outside)
        if self._over:
            return  # it failed before a worker was called
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._too_late)
        # Decode is called first: prefill computes nothing before it has decode's destination.
        for side in reversed(self.entry.sides):
            if not self._over:
                self._call(side)

    async def next(self) -> TokenBatch:
        batch = await self._out.get()
        if isinstance(batch, RoomFailed):
            raise batch
        return batch

    def end_choice(self, choice: int) -> None:
        """Pass no more tokens of one choice on to the reader, and let decode sample no more of them. The room
        ends with its last choice."""
        if choice not in self._merger.going:
            return
        self._merger.going.discard(choice)
        if self._over:
            self._end()
            self._rooms.stop(self.entry.id)
        else:
            self._rooms.streams.to(self.entry.decode).end_choice(self.entry.id, choice)

    async def hang_up(self, why: Hangup) -> None:
        if self._over:
            return
        self._end()
        match why:
            case Hangup.STOP_STRING:
                self._rooms.stop(self.entry.id)
            case Hangup.CLIENT_GONE:
                self._rooms.timelines.report(self.entry.id, Moment.BROKEN_OFF, self._merger.progress())
                self._rooms.fail(self.entry.id, Cause(Reason.CLIENT_GONE, "the client hung up"))
            case Hangup.REQUEST_FAILED:
                self._rooms.timelines.report(self.entry.id, Moment.BROKEN_OFF, self._merger.progress())
                self._rooms.fail(self.entry.id, Cause(Reason.CANCELLED, SIBLING_FAILED))

    @property
    def _over(self) -> bool:
        """Whether no more tokens are passed on, because each choice is complete or the room has ended."""
        return not self._merger.going

    # ---- the two sides

    def _call(self, side: Side) -> None:
        try:
            request = self._opening(side)
            self._rooms.streams.to(self.entry.worker(side)).open(request, self)
        except Exception as error:
            self._could_not_follow(error)
        else:
            self._open_sides.add(side)
            self._holding.add(side)

    def _opening(self, side: Side) -> inference_pb2.RunRoomRequest | inference_pb2.StreamRoomRequest:
        entry, incarnation = self.entry, self.entry.worker(side).incarnation
        request = self._wire = self._wire or request_to_wire(self._request, self._timeout_s)
        if side is Side.PREFILL:
            decode = peer_to_wire(entry.decode)
            return inference_pb2.RunRoomRequest(
                room=entry.id, incarnation=incarnation, decode=decode, request=request
            )
        prefill = None if entry.prefill is None else peer_to_wire(entry.prefill)
        return inference_pb2.StreamRoomRequest(
            room=entry.id,
            incarnation=incarnation,
            prefill=prefill,
            request=request,
            prefill_ms=entry.prefill_ms,
            prefill_own_ms=entry.prefill_own_ms,
        )

    def on_reply(self, side: Side, reply: Any) -> None:
        """Process a message about the room that came from its worker on one side."""
        try:
            self._take(side, reply)
        except Malformed as error:
            text = f"{side.value} worker sent nonsense: {error}"
            self.fail(Cause(LOST[side], text), side)
            self._leave(side)
        except Exception as error:
            self._could_not_follow(error)
        if reply.HasField("outcome"):
            self._ended(side)

    def _take(self, side: Side, reply: Any) -> None:
        match reply.WhichOneof("what"):
            case "tokens":
                part = reply.tokens
                tokens, finish = tuple(map(token_from_wire, part.tokens)), finish_from_wire(part.finish)
                if part.cached_tokens:
                    self.cached_tokens = part.cached_tokens
                if part.local:
                    self._goes_on_with_decode()
                message = TokenMessage(part.choice, part.first, tokens, finish)
                if not self._merger.store(message):
                    self._offer(message)
            case "accepted" if side is Side.PREFILL:
                self._accepted = True
            case "first_token":
                first = reply.first_token
                self.cached_tokens = first.cached_tokens
                self._merger.check_scores()
                self._count(Side.PREFILL)
                tokens, finish = (token_from_wire(first.token),), finish_from_wire(first.finish)
                self._offer(TokenMessage(0, self._merger.given, tokens, finish))
                self._offer_stored()
            case "scores":
                self._merger.add_scores(reply.scores.first, scores_from_wire(reply.scores))
            case "outcome":
                self._note_outcome(side, outcome_from_wire(reply.outcome))
                if side is Side.PREFILL and not self._accepted:
                    raise Malformed("an outcome before the room was accepted")

    def _goes_on_with_decode(self) -> None:
        """Record that decode computes the prompt, and that prefill has no memory for the room.

        Either worker may report that first, and the other may never do. Raises Malformed if prefill has
        computed the prompt, or must.
        """
        if self.entry.is_local:
            return
        if self._request.scores or self._counted:
            raise Malformed("a room that prefill computes is said to be local")
        self._rooms.registry.mark_local(self.entry.id)
        if self._streaming:
            self._count(Side.DECODE)
        self._offer_stored()

    def _note_outcome(self, side: Side, cause: Cause | None) -> None:
        text = Reason.ANSWERED.value if cause is None else f"{cause.reason.value}: {cause.text}"
        self._rooms.timelines.report(self.entry.id, OUTCOMES[side], text)
        if cause is not None and not REASONS[cause.reason].ends_room:
            if side is Side.DECODE:
                raise Malformed(f"the outcome {Reason.LOCAL.value} of a decode worker")
            self._goes_on_with_decode()
            return
        if (
            cause is None
            and side is Side.DECODE
            and not self._merger.going <= self._merger.complete_in_store()
        ):
            cause = Cause(Reason.DECODE_LOST, "decode worker ended the room before its answer was complete")
        if cause is None:
            return
        echo = side is Side.PREFILL and cause.reason is Reason.RECEIVER_CLOSED
        if echo and Side.DECODE in self._open_sides and not self._over:
            self._echo = asyncio.get_running_loop().call_later(ROOT_S, self.fail, cause, side)
        else:
            self.fail(cause, side)

    def on_broken(self, side: Side, error: RemoteError) -> None:
        """Process the error of the worker on one side: it refused the room, or its stream broke."""
        self._open_sides.discard(side)
        self.fail(self._cause_of(side, error), side)
        self._ended(side)

    def _too_late(self) -> None:
        for side in [each for each in Side if each in self._open_sides][:1]:
            name = self.entry.worker(side).name
            text = f"{side.value} worker {name} did not end the room in time"
            self.fail(Cause(Reason.DEADLINE, text), side)
        self._leave_all()

    def _leave(self, side: Side) -> None:
        """Stop listening to the worker on one side of the room, and send it the room's end."""
        if side in self._open_sides:
            cause = self.entry.cause or ANSWERED
            self._rooms.streams.to(self.entry.worker(side)).leave(self.entry.id, cause)
            self._ended(side)

    def _leave_all(self) -> None:
        for side in self.entry.sides:
            self._leave(side)

    def _ended(self, side: Side) -> None:
        self._open_sides.discard(side)
        self._settle()

    def _settle(self) -> None:
        """Finish the room when it is over and neither worker sends more. For a worker that never got the
        room, the room is recorded as retired here."""
        if not self._over or self._open_sides:
            return
        if self._timer is not None:
            self._timer.cancel()
        for side in [each for each in self.entry.sides if each not in self._holding]:
            self._rooms.side_retired(self.entry.id, side)

    def _could_not_follow(self, error: Exception) -> None:
        log.error("a room could not be followed", room=self.entry.id, error=error)
        self.fail(Cause(Reason.BOOTSTRAP_LOST, "the bootstrap could not follow the room to its end"))
        self._leave_all()

    # ---- merging

    def _offer_stored(self) -> None:
        """Pass on the stored messages of decode, because they no longer have to wait for prefill's first
        token."""
        for message in self._merger.release():
            self._offer(message)

    def _count(self, side: Side) -> None:
        """Count the room's prompt in the metrics as computed on this side."""
        if not self._counted:
            self._counted = True
            self._rooms.computed(self.entry, side, self._request.prefill_tokens - self.cached_tokens)

    def _offer(self, message: TokenMessage) -> None:
        """Pass on the tokens of a message that are new: the other worker has not sent their positions. Raises
        Malformed."""
        try:
            batch = self._merger.take(message)
        except TokensLost as error:
            self.fail(Cause(Reason.DECODE_LOST, str(error)), Side.DECODE)
            return
        if batch is None:
            return
        if not self._streaming:
            self._streaming = True
            self._rooms.registry.mark_streaming(self.entry.id)
            self._rooms.timelines.report(self.entry.id, Moment.FIRST_TOKEN_PASSED_ON)
            if self.entry.is_local:
                self._count(Side.DECODE)
        if self._over:
            self._end()
            self._rooms.answered(self.entry.id, self._merger.progress())
        self._out.put(batch)

    def fail(self, cause: Cause, teller: Side | None = None) -> None:
        """End the room because of a failure that a worker's stream shows. `teller`: side whose worker
        reported it. None if neither worker did."""
        if self._over:
            if teller is not None:
                self._rooms.fail_rest(self.entry, cause)
            return
        self.reporter = teller
        self._rooms.fail(self.entry.id, cause)

    def _failed_outside(self, cause: Cause) -> None:
        if not self._over:
            self._rooms.timelines.report(self.entry.id, Moment.BROKEN_OFF, self._merger.progress())
            self.cause = cause
            self._out.put(RoomFailed(cause.text, cause.reason))
            self._end()

    def _end(self) -> None:
        """End the stream of tokens for its reader. The outcomes of the workers are awaited for LINGER_S."""
        self._merger.going.clear()
        for timer in (self._timer, self._echo):
            if timer is not None:
                timer.cancel()
        if self._open_sides:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._leave_all)
        self._settle()

    def _cause_of(self, side: Side, remote: RemoteError) -> Cause:
        """Return the cause of the room's failure, after a worker refused the room or its stream broke. A
        worker that cannot be reached gets no rooms until it renews its lease."""
        facts = self.entry.worker(side)
        name = f"{side.value} worker {facts.name}"
        if remote.kind == WrongIncarnation.__name__:
            self._holding.discard(side)
            self._rooms.registry.suspect(facts.incarnation)
            return Cause(LOST[side], f"{name} is another process now: {remote}")
        if not remote.unreachable:
            self._holding.discard(side)
            if remote.kind == Draining.__name__:
                self._rooms.registry.suspect(facts.incarnation)
            return Cause(Reason.REFUSED, f"{name}: {str(remote).removeprefix(f'{name}: ')}")
        if remote.code is grpc.StatusCode.OK:
            return Cause(LOST[side], f"{name} ended without an outcome")
        self._rooms.registry.suspect(facts.incarnation)
        return Cause(LOST[side], f"{name} broke off: {remote}")


def _is_first_from_prefill(request: Request) -> bool:
    """Return whether prefill alone can report the first token of a request.

    That is so if the prompt is scored, or if more log-probabilities are wanted than a metadata record holds
    (`record-fits`).
    """
    sampling = request.sampling
    tops = (sampling.top_logprobs or 0) + len(sampling.logprob_token_ids)
    return request.prompt_logprobs is not None or tops > ALTERNATIVES_MAX
