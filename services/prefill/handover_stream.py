"""Stream of one decode worker to this prefill worker.

Requests for many rooms at one time arrive in one message, enter one turn, and are answered in one message. A
connect or a grant is answered when a turn has applied it. A close is answered when it is proven that no write
of its room can follow. No request has a deadline: as long as the stream lives, the receiver knows that this
worker does.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeAlias

from baton.ids import Incarnation, RoomId
from baton.prefill.early_grants import EarlyGrant
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.errors import PeerFault, Refusal, UnknownRoom
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
        self.receiver: Incarnation | None = None
        """Incarnation of the decode worker. None until it has proven its identity."""
        self._secret = b""
        self.unsent: deque[Answer] = deque()
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._pending: set[asyncio.Future[None]] = set()
        """Futures of requests that no turn has applied yet, and of closes whose rooms may still have writes
        under way."""
        self.early_grants: dict[RoomId, EarlyGrant] = {}
        """Grants of this stream whose rooms have not been opened on this worker yet."""
        self._closing: set[RoomId] = set()
        """Rooms that the decode worker has closed and whose close has no answer yet. A second close of such a
        room is ignored. A grant of such a room does not wait for the room to open."""
        self._end: Exception | None = None
        self._over = False
        self._reading: asyncio.Task[None] | None = None

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
            while self.early_grants:
                self._work.early.drop(self.early_grants.popitem()[1])

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
        self.receiver, self._secret = Incarnation(greeting.receiver), greeting.secret

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
            self._ask_grant(grant)
        for close in request.closes:
            room = RoomId(close.room)
            if room in self._closing:
                continue  # it has one answer
            close.receiver = self.receiver
            self._drop_early(room)
            self._closing.add(room)
            self._ask(group_pb2.Command(close=close), partial(self._closed, close))

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

    def _ask_grant(self, grant: inference_pb2.GrantRequest) -> None:
        self._ask(group_pb2.Command(grant=grant), partial(self._granted, grant))

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
        room = RoomId(grant.room)
        if isinstance(error, UnknownRoom) and room not in self._closing:
            if room in self._work.roster:  # the room opened in the same turn, after the grant
                self._ask_grant(grant)
                return
            if not self._work.roster.retired(room) and self._keep_early(grant, error):
                return
        reply = inference_pb2.GrantReply(room=room)
        if error is not None:
            reply.refused.CopyFrom(refusal_to_wire(error))
        self._answer(reply)

    def _closed(self, close: inference_pb2.CloseRequest, error: Exception | None) -> None:
        if error is None:
            self._follow(self._work.quiet(RoomId(close.room)), partial(self._quiet, close))
        else:
            self._quiet(close, error)

    def _quiet(self, close: inference_pb2.CloseRequest, error: Exception | None) -> None:
        self._closing.discard(RoomId(close.room))
        reply = inference_pb2.CloseReply(room=close.room, generation=close.generation)
        if error is not None:
            reply.refused.CopyFrom(refusal_to_wire(error))
        self._answer(reply)

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

    # ---- grants that come before their rooms

    def _keep_early(self, grant: inference_pb2.GrantRequest, error: Exception) -> bool:
        room = RoomId(grant.room)
        if self.receiver is None:
            return False

        def apply() -> None:
            del self.early_grants[room]
            self._ask_grant(grant)

        def expired() -> None:
            del self.early_grants[room]
            self._answer(inference_pb2.GrantReply(room=room, refused=refusal_to_wire(error)))

        waiting = self._work.early.add(room, self.receiver, apply, expired)
        if waiting is None:
            return False
        self.early_grants[room] = waiting
        return True

    def _drop_early(self, room: RoomId) -> None:
        waiting = self.early_grants.pop(room, None)
        if waiting is not None:
            self._work.early.drop(waiting)
