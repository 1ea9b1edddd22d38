"""Stream of one decode worker to this prefill worker.

Requests for many rooms at one time arrive in one message, enter one turn, and are answered in one message.
When each is answered, and which grants wait for their rooms, is decided by `baton.handover.sending_session`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeAlias, TypeVar, assert_never

from baton.handover.requests import StartTimer, StopTimer
from baton.handover.sending_session import (
    AnswerClose,
    AnswerGrant,
    ApplyClose,
    ApplyGrant,
    AwaitQuiet,
    SendingRequest,
    SendingSession,
)
from baton.handover.session_messages import Timer
from baton.ids import Generation, Incarnation, RoomId
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.errors import PeerFault, Refusal
from baton.runtime.timers import Timers
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.channel import check_incarnation
from baton.wire.errors import refusal_to_wire
from baton.wire.layout_messages import layout_to_wire

ANSWERS_MAX: Final = 4_096
"""Most answers that may wait until the decode worker reads them. While more wait, this worker reads no
further message of the stream."""
MESSAGE_MAX: Final = 1_024
"""Most answers in one message to the decode worker."""

Answer: TypeAlias = inference_pb2.ConnectReply | inference_pb2.GrantReply | inference_pb2.CloseReply


class HandOverStream:
    """Stream of one decode worker to this prefill worker, with grants and closes of rooms. If it ends, its
    requests are forgotten. The rooms then end by their deadline or by a close on the next stream."""

    def __init__(self, work: PrefillWork) -> None:
        self._work = work
        self._mailbox = work.ports.mailbox
        self._mine = work.ports.incarnation
        self._layouts = work.ports.layouts
        self.session: SendingSession[inference_pb2.GrantRequest] = SendingSession(work.early, self)
        self._timers: Timers[Timer] = Timers()
        self._secret = b""
        self.unsent: deque[Answer] = deque()
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._pending: set[asyncio.Future[None]] = set()
        """Futures of requests that no turn has applied yet, and of closes whose rooms may still have writes
        under way."""
        self._end: Exception | None = None
        self._over = False
        self._reading: asyncio.Task[None] | None = None

    @property
    def receiver(self) -> Incarnation | None:
        """Incarnation of the decode worker. None until it has proven its identity."""
        return self.session.receiver

    @asynccontextmanager
    async def reading(
        self,
        requests: AsyncIterator[inference_pb2.HandOverRequest],
        greeted: Callable[["HandOverStream"], None],
    ) -> AsyncIterator["HandOverStream"]:
        """Read and process the decode worker's messages while the context lasts.

        `greeted`: called when the decode worker has proven its identity.
        """
        self._reading = asyncio.create_task(self._read(requests, greeted))
        self._reading.add_done_callback(lambda _: self._news.set())
        try:
            yield self
        finally:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            for pending in list(self._pending):
                pending.cancel()
            self.session.end()
            self._carry_out()

    async def messages(self) -> AsyncGenerator[inference_pb2.HandOverReply, None]:
        """Yield messages with answers until the stream ends. Raises the error that ended it."""
        while not self._over:
            await self._news.wait()
            self._news.clear()
            while self.unsent:
                yield self._message()
                self._taken.set()
            if self._end is not None:
                raise self._end
            if self._reading is not None and self._reading.done():
                self._reading.result()
                return

    def end(self, error: Exception | None = None) -> None:
        """End the stream, because this worker leaves or because of `error`."""
        self._end, self._over = error, error is None
        self._news.set()

    # ---- requests

    async def _read(
        self,
        requests: AsyncIterator[inference_pb2.HandOverRequest],
        greeted: Callable[["HandOverStream"], None],
    ) -> None:
        async for request in requests:
            if self.receiver is None:
                self._greet(request)
                greeted(self)
            elif request.HasField("greeting"):
                raise PeerFault("a stream is greeted once")
            self._take(request)
            while len(self.unsent) > ANSWERS_MAX:
                self._taken.clear()
                await self._taken.wait()

    def _greet(self, request: inference_pb2.HandOverRequest) -> None:
        """Check the first message of a stream, which names and proves the decode worker. Raises
        WrongIncarnation, UnknownReceiver, NotAdmitted."""
        greeting = request.greeting
        check_incarnation(self._mine, greeting.incarnation)
        self._work.receivers.check(Incarnation(greeting.receiver), greeting.secret)
        self.session.receiver, self._secret = Incarnation(greeting.receiver), greeting.secret

    def _take(self, request: inference_pb2.HandOverRequest) -> None:
        """Put all requests of one message into the mailbox, so that one turn applies them. Raises
        UnknownReceiver if the decode worker is gone meanwhile."""
        if self.receiver is None:
            raise AssertionError("nobody has greeted")
        self._work.receivers.check(self.receiver, self._secret)
        if request.HasField("connect"):
            request.connect.receiver = self.receiver
            self._ask(group_pb2.Command(connect=request.connect), partial(self._connected, request.connect))
        for grant in request.grants:
            grant.receiver = self.receiver
            self.session.grant(RoomId(grant.room), grant)
        for close in request.closes:
            self.session.close(RoomId(close.room), Generation(close.generation))
        self._carry_out()

    def _ask(self, command: group_pb2.Command, answered: Callable[[Exception | None], None]) -> None:
        try:
            pending = self._mailbox.enter(command)
        except Refusal as error:
            answered(error)
        else:
            self._follow(pending, answered)

    def _follow(self, pending: asyncio.Future[None], answered: Callable[[Exception | None], None]) -> None:
        self._pending.add(pending)

        def answer(pending: asyncio.Future[None]) -> None:
            self._pending.discard(pending)
            if not pending.cancelled():
                error = pending.exception()
                answered(error if isinstance(error, Exception) else None)

        pending.add_done_callback(answer)

    # ---- answers

    def _connected(self, connect: inference_pb2.ConnectRequest, error: Exception | None) -> None:
        reply = inference_pb2.ConnectReply()
        if connect.endpoints:
            reply.exposure = connect.endpoints[0].incarnation
        if error is None:
            reply.layouts.extend(layout_to_wire(each) for each in self._layouts)
        else:
            reply.refused.CopyFrom(refusal_to_wire(error))
        self._answer(reply)

    def _granted(self, grant: inference_pb2.GrantRequest, error: Exception | None) -> None:
        room, roster = RoomId(grant.room), self._work.roster
        is_open, is_retired = room in roster, roster.retired(room)
        self.session.grant_applied(room, grant, error, is_open=is_open, is_retired=is_retired)
        self._carry_out()

    def _closed(self, room: RoomId, generation: Generation, error: Exception | None) -> None:
        self.session.close_applied(room, generation, error)
        self._carry_out()

    def _quiet(self, room: RoomId, generation: Generation, error: Exception | None) -> None:
        if error is None:
            self.session.quiet(room, generation)
            self._carry_out()

    def room_opened(self, room: RoomId) -> None:
        self.session.room_opened(room)
        self._carry_out()

    def _fire(self, timer: Timer) -> None:
        self.session.fire(timer)
        self._carry_out()

    def _carry_out(self) -> None:
        for request in self.session.take_requests():
            self._do(request)

    def _do(self, request: SendingRequest[inference_pb2.GrantRequest]) -> None:
        match request:
            case ApplyGrant(_, grant):
                self._ask(group_pb2.Command(grant=grant), partial(self._granted, grant))
            case ApplyClose(room, generation):
                close = inference_pb2.CloseRequest(
                    room=room, receiver=self.receiver or 0, generation=generation
                )
                self._ask(group_pb2.Command(close=close), partial(self._closed, room, generation))
            case AwaitQuiet(room, generation):
                self._follow(self._work.quiet(room), partial(self._quiet, room, generation))
            case AnswerGrant(room, error):
                self._answer(_with_refusal(inference_pb2.GrantReply(room=room), error))
            case AnswerClose(room, generation, error):
                reply = inference_pb2.CloseReply(room=room, generation=generation)
                self._answer(_with_refusal(reply, error))
            case StartTimer(timer, after_s):
                self._timers.start(timer, after_s, self._fire)
            case StopTimer(timer):
                self._timers.stop(timer)
            case _:
                assert_never(request)

    def _answer(self, answer: Answer) -> None:
        self.unsent.append(answer)
        self._news.set()

    def _message(self) -> inference_pb2.HandOverReply:
        message = inference_pb2.HandOverReply()
        for _ in range(min(len(self.unsent), MESSAGE_MAX)):
            match self.unsent.popleft():
                case inference_pb2.ConnectReply() as connect:
                    message.connects.append(connect)
                case inference_pb2.GrantReply() as grant:
                    message.grants.append(grant)
                case inference_pb2.CloseReply() as close:
                    message.closes.append(close)
        return message


R = TypeVar("R", inference_pb2.GrantReply, inference_pb2.CloseReply)


def _with_refusal(reply: R, error: Exception | None) -> R:
    if error is not None:
        reply.refused.CopyFrom(refusal_to_wire(error))
    return reply
