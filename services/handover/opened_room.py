"""A room at its opener: the process that opened it, and that reads the streams of its two workers.

Both workers are called at once. Their tokens are merged by position. The first token is passed on from the
worker that sends it first. That is prefill, so the first token does not wait for the hand-over. If prefill
alone can report the log-probabilities of the first token, decode's tokens wait for it. The first cause of a
failure is the room's (`first-cause-wins`), and the other worker is informed at once
(`terminal-reaches-peer`). If prefill reports that decode closed the room, decode's own cause is awaited. The
room ends when both streams have ended (`room-ends`), and by its time limit (`deadline-everywhere`).

A room is local if decode computes its prompt. Prefill reports that instead of a first token, or there was no
prefill worker. Then all tokens come from decode.

A room of several choices has a position for each. It is answered when each choice is complete, or its reader
wants no more of it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from baton.handover.opener_messages import (
    ANSWERED,
    Accepted,
    Break,
    CountPrompt,
    EndChoice,
    Fail,
    FailReader,
    FailRest,
    FirstToken,
    Leave,
    MarkAnswered,
    MarkFull,
    MarkLocal,
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
from baton.handover.token_merger import TokenMerger, TokensLost
from baton.ids import RoomId
from baton.rooms.errors import Cause, PeerFault, Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import LOST, REASONS
from baton.rooms.request import Request, TokenBatch
from baton.rooms.timeline import Moment

OUTCOMES: Final = {Side.PREFILL: Moment.PREFILL_OUTCOME, Side.DECODE: Moment.DECODE_OUTCOME}
LINGER_S: Final = 10.0
"""Longest time in seconds to wait for the outcomes of both workers after a room has ended."""
ROOT_S: Final = 1.0
"""Time for decode to report why it closed the room, after prefill reported the closing, in seconds. Decode
sends its tokens before that."""


class OpenedRoom:
    """Room at its opener. Pure: messages, commands and the end of pauses enter, and requests come out of
    `take_requests`."""

    def __init__(self, room: RoomId, request: Request, workers: Mapping[Side, str], limit_s: float) -> None:
        """Make a room that was not sent to its workers yet. `workers`: names of its workers. Without a
        prefill worker, decode computes the prompt. `limit_s`: time limit of the room, in seconds."""
        self.room = room
        self.request = request
        self.cached_tokens = 0
        self.cause: Cause | None = None
        """Cause with which the reader's stream has failed. None if it has not."""
        self.reporter: Side | None = None
        """Side (prefill or decode) whose worker reported the room's failure. None if neither did."""
        self.is_local = Side.PREFILL not in workers
        """Whether decode computes the prompt."""
        self._workers = workers
        self._limit_s = limit_s
        self._merger = TokenMerger(request, workers[Side.DECODE], is_local=self.is_local)
        self._first_cause: Cause | None = None
        """Cause for which the room ended early. None while it has not, and if it was answered."""
        self._is_streaming = False
        """Whether the first token was passed on to the reader."""
        self._is_counted = False
        """Whether the room's prompt was already counted as computed."""
        self._is_accepted = False
        """Whether the prefill worker has accepted the room."""
        # Decode is called first: prefill computes nothing before it has decode's destination.
        self._unopened = [Side.DECODE] if self.is_local else [Side.DECODE, Side.PREFILL]
        """Sides to whose workers the room has not been sent."""
        self._open: set[Side] = set()
        """Sides (prefill, decode) from whose workers more messages about the room may come."""
        self._holding: set[Side] = set()
        """Sides (prefill, decode) whose workers may have the room, and so will report it retired."""
        self._settled = False
        self._closing: Cause | None = None
        """Prefill's outcome that decode closed the room, while decode's own cause is awaited."""
        self._timers: set[RoomTimer] = set()
        """Timers that run."""
        self._requests: list[OpenerRequest] = []

    def take_requests(self) -> list[OpenerRequest]:
        """Return the requests since the last call, in the order in which they have to be carried out."""
        requests, self._requests = self._requests, []
        return requests

    @property
    def is_over(self) -> bool:
        """Whether no more tokens are passed on, because each choice is complete or the room has ended."""
        return not self._merger.going

    @property
    def is_settled(self) -> bool:
        """Whether the room is over and neither worker sends more of it. Nothing can change it any more."""
        return self._settled

    # ---- commands of the opener

    def start(self) -> None:
        """Send the room to its workers. Does nothing if it has ended already."""
        if not self.is_over:
            self._start_timer(RoomTimer.LIMIT, self._limit_s)
            self._open_next()

    def opened(self, side: Side) -> None:
        """Record that the room was sent to its worker on one side. Messages of the worker follow."""
        self._unopened.remove(side)
        self._open.add(side)
        self._holding.add(side)
        self._open_next()

    def end_choice(self, choice: int) -> None:
        """Pass on no more tokens of one choice. The room ends with its last choice."""
        if choice not in self._merger.going:
            return
        self._merger.going.discard(choice)
        if self.is_over:
            self._end()
            self._requests.append(Stop())
        else:
            self._requests.append(EndChoice(choice))

    def stop(self) -> None:
        """End the room, because its client already has the complete response."""
        if not self.is_over:
            self._end()
            self._requests.append(Stop())

    def give_up(self, cause: Cause) -> None:
        """End the room with this cause, because its reader reads no more."""
        if not self.is_over:
            self._first_cause = cause
            self._end()
            self._report(Moment.BROKEN_OFF, self._merger.progress())
            self._requests.append(Fail(cause))

    def end(self, cause: Cause) -> None:
        """End the room for a cause that the opener has recorded already, such as the loss of a worker."""
        if not self.is_over:
            self.cause = self._first_cause = cause
            self._report(Moment.BROKEN_OFF, self._merger.progress())
            self._requests.append(FailReader(cause))
            self._end()

    def abandon(self) -> None:
        """End the room, because an error of the opener itself keeps it from reading the room."""
        self._fail(Cause(Reason.BOOTSTRAP_LOST, "the bootstrap could not follow the room to its end"))
        self._leave_all()

    # ---- what comes from the workers

    def receive(self, side: Side, message: WorkerMessage) -> TokenBatch | None:
        """Process a message about the room from its worker on one side. Most messages only continue a choice.
        Their tokens are returned, and request nothing. All else comes out of `take_requests`."""
        try:
            if type(message) is TokenMessage:
                return self._take_tokens(message)
            self._take(side, message)
        except PeerFault as error:
            self.malformed(side, str(error))
        return None

    def malformed(self, side: Side, text: str) -> None:
        """Process a message of a worker that has invalid values. `text`: which ones."""
        self._fail(Cause(LOST[side], f"{side.value} worker sent nonsense: {text}"), side)
        self._leave(side)

    def broken(self, side: Side, how: Break, text: str) -> None:
        """Process the end of a worker's stream without an outcome. `text`: error of the stream."""
        self._open.discard(side)
        cause = self._cause_of(side, how, text)
        if self._needs(side):
            self._fail(cause, side)
        self._settle()

    # ---- time

    def passed(self, timer: RoomTimer) -> None:
        """Process the end of a timer's pause. Does nothing if the timer was stopped."""
        if timer not in self._timers:
            return
        self._timers.discard(timer)
        match timer:
            case RoomTimer.ROOT if self._closing is not None:
                self._fail(self._closing, Side.PREFILL)
            case RoomTimer.LIMIT:
                for late in [each for each in Side if each in self._open][:1]:
                    text = f"{late.value} worker {self._workers[late]} did not end the room in time"
                    self._fail(Cause(Reason.DEADLINE, text), late)
                self._leave_all()
            case RoomTimer.LINGER:
                self._leave_all()

    # ---- inside

    def _open_next(self) -> None:
        if self._unopened and not self.is_over:
            self._requests.append(Open(self._unopened[0]))

    def _take_tokens(self, message: TokenMessage) -> TokenBatch | None:
        """Process tokens of decode. Return them as `_offer` does."""
        batch, first, cached_tokens, is_local = message
        if cached_tokens:
            self.cached_tokens = cached_tokens
        if is_local:
            self._go_on_with_decode()
        if self._merger.awaits_prefill:
            self._merger.store(message)
            return None
        return self._offer(batch, first)

    def _take(self, side: Side, message: WorkerMessage) -> None:
        match message:
            case Accepted():
                self._is_accepted = self._is_accepted or side is Side.PREFILL
            case FirstToken():
                self.cached_tokens = message.cached_tokens
                self._merger.check_scores()
                self._count(Side.PREFILL)
                token = TokenMessage(TokenBatch((message.token,), message.finish), self._merger.given)
                self._pass_on([token, *self._merger.release()])
            case ScoreMessage():
                self._merger.add_scores(message.first, message.scores)
            case RoomOutcome():
                self._open.discard(side)
                self._take_outcome(side, message.cause)
                self._settle()
                if side is Side.PREFILL and not self._is_accepted:
                    raise PeerFault("an outcome before the room was accepted")

    def _go_on_with_decode(self) -> None:
        """Record that decode computes the prompt. Either worker may report that first, and the other may
        never do. Raises PeerFault if prefill has computed the prompt, or must."""
        if self.is_local:
            return
        if self.request.scores or self._is_counted:
            raise PeerFault("a room that prefill computes is said to be local")
        self.is_local = True
        self._requests.append(MarkLocal())
        if self._is_streaming:
            self._count(Side.DECODE)
        self._pass_on(self._merger.release())

    def _take_outcome(self, side: Side, cause: Cause | None) -> None:
        text = Reason.ANSWERED.value if cause is None else f"{cause.reason.value}: {cause.text}"
        self._report(OUTCOMES[side], text)
        if cause is not None and not REASONS[cause.reason].ends_room:
            if side is Side.DECODE:
                raise PeerFault(f"the outcome {Reason.LOCAL.value} of a decode worker")
            self._go_on_with_decode()
            return
        cause = cause or self._missing(side)
        if cause is None or not self._needs(side):
            return
        echo = side is Side.PREFILL and cause.reason is Reason.RECEIVER_CLOSED
        if echo and Side.DECODE in self._open and not self.is_over:
            self._closing = cause
            self._start_timer(RoomTimer.ROOT, ROOT_S)
        else:
            self._fail(cause, side)

    def _needs(self, side: Side) -> bool:
        """Return whether the room needs this worker. A local one needs decode (`mine-or-granted`)."""
        return side is Side.DECODE or not self.is_local

    def _missing(self, side: Side) -> Cause | None:
        """Return the cause of failure if a worker completed its part without all its tokens, or None."""
        if side is Side.PREFILL and self._merger.awaits_prefill:
            return Cause(Reason.PREFILL_LOST, "prefill worker ended the room before its first token")
        if side is Side.DECODE and not self._merger.going <= self._merger.complete_in_store():
            return Cause(Reason.DECODE_LOST, "decode worker ended the room before its answer was complete")
        return None

    def _pass_on(self, messages: Iterable[TokenMessage]) -> None:
        """Pass on the new tokens of messages, none of which has to wait any more. Raises PeerFault."""
        for batch, first, _, _ in messages:
            if (fresh := self._offer(batch, first)) is not None:
                self._requests.append(fresh)

    def _offer(self, batch: TokenBatch, first: int) -> TokenBatch | None:
        """Pass on those tokens of a batch that are new: the other worker has not sent their positions. Return
        them if that is all, and request nothing. `first`: position of its first token. Raises PeerFault."""
        try:
            fresh = self._merger.take(batch, first)
        except TokensLost as error:
            self._fail(Cause(Reason.DECODE_LOST, str(error)), Side.DECODE)
            return None
        if fresh is None or (self._is_streaming and self._merger.going and not self._requests):
            return fresh
        if not self._is_streaming:
            self._is_streaming = True
            self._requests.append(Stream())
            if self.is_local:
                self._count(Side.DECODE)
        if self.is_over:
            self._end()
            self._requests.append(MarkAnswered(self._merger.progress()))
        self._requests.append(fresh)
        return None

    def _count(self, side: Side) -> None:
        """Count the room's prompt as computed on this side, once."""
        if not self._is_counted:
            self._is_counted = True
            self._requests.append(CountPrompt(side, self.request.prefill_tokens - self.cached_tokens))

    def _fail(self, cause: Cause, reporter: Side | None = None) -> None:
        """End the room for a failure that a worker's stream shows. `reporter`: side that reported it."""
        if not self.is_over:
            self.reporter = reporter
            self._requests.append(Fail(cause))
            self.end(cause)
        elif reporter is not None and self._first_cause is None and cause.reason is not Reason.ANSWERED:
            self._requests.append(FailRest(cause))

    def _cause_of(self, side: Side, how: Break, text: str) -> Cause:
        """Return the cause of the room's failure, after a worker refused the room or its stream broke. A
        worker that cannot be reached gets no rooms until it renews its lease."""
        name = f"{side.value} worker {self._workers[side]}"
        if how not in (Break.CLOSED, Break.LOST):
            self._holding.discard(side)
        if how in (Break.REPLACED, Break.DRAINING, Break.LOST):
            self._requests.append(Suspect(side))
        match how:
            case Break.REPLACED:
                return Cause(LOST[side], f"{name} is another process now: {text}")
            case Break.REFUSED | Break.DRAINING:
                return Cause(Reason.REFUSED, f"{name}: {text.removeprefix(f'{name}: ')}")
            case Break.FULL:
                self._requests.append(MarkFull(side))
                return Cause(Reason.WORKER_FULL, f"{name} is full: {text}")
            case Break.CLOSED:
                return Cause(LOST[side], f"{name} ended without an outcome")
            case Break.LOST:
                return Cause(LOST[side], f"{name} broke off: {text}")

    def _leave(self, side: Side) -> None:
        """Read no more of a worker's messages about the room, and send it the room's end."""
        if side in self._open:
            self._open.discard(side)
            self._requests.append(Leave(side, self._first_cause or ANSWERED))
            self._settle()

    def _leave_all(self) -> None:
        for side in self._workers:
            self._leave(side)

    def _end(self) -> None:
        """End the stream of tokens for its reader. The outcomes of the workers are awaited for LINGER_S."""
        self._merger.going.clear()
        self._stop_timer(RoomTimer.LIMIT)
        self._stop_timer(RoomTimer.ROOT)
        if self._open:
            self._start_timer(RoomTimer.LINGER, LINGER_S)
        self._settle()

    def _settle(self) -> None:
        """Finish the room when it is over and neither worker sends more. For a worker that never got the
        room, the room is recorded as retired here."""
        if self._settled or self._open or not self.is_over:
            return
        self._settled = True
        self._stop_timer(RoomTimer.LINGER)
        for side in self._workers:
            if side not in self._holding:
                self._requests.append(MarkRetired(side))

    def _start_timer(self, timer: RoomTimer, seconds: float) -> None:
        self._timers.add(timer)
        self._requests.append(StartTimer(timer, seconds))

    def _stop_timer(self, timer: RoomTimer) -> None:
        if timer in self._timers:
            self._timers.discard(timer)
            self._requests.append(StopTimer(timer))

    def _report(self, moment: Moment, detail: str) -> None:
        self._requests.append(Report(self.room, moment, detail))
