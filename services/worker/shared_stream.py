"""Stream on which one caller opens many rooms and reads the replies of all of them.

Replies are collected until the stream can take a message. So the tokens that one engine step sampled for
several rooms leave in one message. If the caller does not read, replies wait. Their number is bounded by the
replies that its rooms can ever have.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeAlias, TypeVar

from baton.ids import NO_OPENER, Incarnation, Opener, RoomId
from baton.rooms.errors import PeerFault, Refusal, RoomExists
from baton.runtime.logging import Log
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.channel import check_incarnation
from baton.wire.errors import refusal_to_wire
from baton.worker.callers import Callers

log = Log(__name__)

LINES_MAX: Final = 1024
"""Most replies in one message of a shared stream."""
REPLIES_MAX: Final = 2**31
"""Most replies of an adopted room. Its request bounds them, which the adopting router does not repeat."""
MESSAGE_BYTES: Final = 2**15
"""Length in bytes at which a message of a shared stream is full, so that further replies go into the next
message.

The reader parses each message at once, and all other rooms wait for that. Parsing log-probabilities of this
length takes milliseconds. Log-probabilities of a prompt, or of a whole vocabulary, may take megabytes.
"""

Reply = TypeVar("Reply", inference_pb2.RunRoomReply, inference_pb2.StreamRoomReply)
Rooms = TypeVar("Rooms", inference_pb2.RunRoomsReply, inference_pb2.StreamRoomsReply)
Line: TypeAlias = tuple[RoomId, Reply | inference_pb2.Refused | None]
"""Entry of a message on a shared stream: id of a room, and one reply of the room. The reply is None if the
caller cancelled the room and this worker does not have it."""
Judge: TypeAlias = Callable[[Any], tuple[group_pb2.Command, int]]
"""Function that takes a request to open a room. It returns the command that opens the room, and the most
replies that the room can have. Raises Refusal."""
Rest: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]
"""Function that processes the parts of a caller's message that neither open nor cancel rooms, such as ending
single choices. Raises the errors of `Mailbox.ask`."""


class SharedStream(Generic[Reply]):
    """Stream of one caller for many rooms. If the stream ends, others may adopt its unfinished rooms for a
    while (`orphan-ends`)."""

    def __init__(
        self, callers: Callers[Reply], judge: Judge, incarnation: Incarnation, rest: Rest | None = None
    ) -> None:
        """Make a stream without rooms.

        `incarnation`: id of this worker process. `rest`: handler of parts of a message that neither open nor
        cancel rooms.
        """
        self._rest = rest
        self._callers: Callers[Reply] = callers
        self._judge = judge
        self._incarnation = incarnation
        self._rooms: dict[RoomId, _RoomReplies[Reply]] = {}
        """Queue of the replies of each room whose outcome (last reply) was not sent yet, by room id."""
        self.opener = NO_OPENER
        """Router that opened the last room on this stream. A stream has one caller, and so one opener."""
        self._pending: deque[Line[Reply]] = deque()
        self._news = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def reading(self, requests: AsyncIterator[Any]) -> AsyncIterator["SharedStream[Reply]"]:
        """Read the caller's messages, and open and cancel rooms as they demand, while the context lasts."""
        self._reading = asyncio.create_task(self._read(requests))
        self._reading.add_done_callback(lambda _: self._news.set())
        try:
            yield self
        finally:
            rooms, self._rooms = self._rooms, {}
            for room, replies in rooms.items():
                self._callers.orphan(room, replies.opener)
            tasks = [self._reading, *self._calls]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def lines(self) -> AsyncGenerator[Sequence[Line[Reply]], None]:
        """Yield the replies, a message at a time, until the requests and all rooms have ended. Raises the
        error that ended the requests early."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._pending:
                yield self._next()
            if self._reading is not None and self._reading.done():
                self._reading.result()
                if not self._rooms and not self._pending and not self._calls:
                    return

    def _next(self) -> Sequence[Line[Reply]]:
        lines: list[Line[Reply]] = []
        length = 0
        while self._pending and len(lines) < LINES_MAX and length < MESSAGE_BYTES:
            line = self._pending.popleft()
            lines.append(line)
            length += 0 if line[1] is None else line[1].ByteSize()
        return lines

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            for each in request.open:
                self._open(each)
            for each in request.adopt:
                self._adopt(each)
            for each in request.cancel:
                self._start(self._cancel(each))  # after the opening of its room, which was started before
            if self._rest is not None:
                self._start(self._take_rest(self._rest, request))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._take_result)

    def _take_result(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._news.set()

    def _open(self, request: Any) -> None:
        room = RoomId(request.room)
        if room in self._rooms:
            log.warning("a room was opened twice on one stream", room=room)
            return  # a refusal would end the first opening
        try:
            command, most = self._judge(request)
        except Exception as error:
            self._refuse(room, error)
            return
        self.opener = Opener(request.opener)
        replies = self._rooms[room] = _RoomReplies(self, room, self.opener, most)
        self._start(self._enter(replies, command))

    def _adopt(self, request: inference_pb2.AdoptRequest) -> None:
        """Take over a room whose router's stream broke. Its replies come on this stream from now on."""
        room = RoomId(request.room)
        if room in self._rooms:
            self._refuse(room, RoomExists(f"room {room} is read on this stream"))
            return
        try:
            check_incarnation(self._incarnation, request.incarnation)
        except Exception as error:
            self._refuse(room, error)
            return
        self.opener = Opener(request.opener)
        replies = self._rooms[room] = _RoomReplies(self, room, self.opener, REPLIES_MAX)
        self._start(self._enter(replies, group_pb2.Command(adopt=request)))

    async def _cancel(self, request: inference_pb2.CancelRequest) -> None:
        room = RoomId(request.room)
        try:
            check_incarnation(self._incarnation, request.incarnation)
            is_here = await self._callers.cancel(request)
        except (Refusal, PeerFault) as error:
            log.debug("a cancel was not taken", room=room, cause=str(error))
        else:
            if not is_here:
                self._enqueue(room, None)

    async def _take_rest(self, rest: Rest, request: Any) -> None:
        try:
            await rest(request)
        except (Refusal, PeerFault) as error:
            log.debug("what was asked of a room was not taken", cause=str(error))

    async def _enter(self, replies: "_RoomReplies[Reply]", command: group_pb2.Command) -> None:
        try:
            await self._callers.open(replies.room, command, replies)
        except Exception as error:
            if self._rooms.get(replies.room) is not replies:
                return  # the stream has ended meanwhile and gave the room up
            del self._rooms[replies.room]
            if not isinstance(error, Refusal | PeerFault):
                self._callers.give_up(replies.room, replies.opener)  # a turn may still open it
            self._refuse(replies.room, error)

    def _refuse(self, room: RoomId, error: Exception) -> None:
        refused = refusal_to_wire(error)
        if not refused.kind:
            log.error("a room could not be opened", room=room, error=error)
        self._enqueue(room, refused)

    def _enqueue(self, room: RoomId, reply: Reply | inference_pb2.Refused | None) -> None:
        self._pending.append((room, reply))
        self._news.set()

    def reply(self, replies: "_RoomReplies[Reply]", reply: Reply) -> None:
        """Add a reply of a room to the stream. Replies of rooms that have ended are dropped."""
        if self._rooms.get(replies.room) is not replies:
            return
        if reply.HasField("outcome"):
            del self._rooms[replies.room]
        self._enqueue(replies.room, reply)


class _RoomReplies(Generic[Reply]):
    """Destination of one room's replies on a shared stream."""

    __slots__ = ("_left", "_stream", "opener", "room")

    def __init__(self, stream: SharedStream[Reply], room: RoomId, opener: Opener, replies_max: int) -> None:
        self._stream: SharedStream[Reply] = stream
        self._left = replies_max
        self.room = room
        self.opener = opener

    def put_nowait(self, reply: Reply) -> None:
        """Add a reply of the room. Raises QueueFull if the room already had its largest possible number of
        replies."""
        if self._left == 0:
            raise asyncio.QueueFull
        self._left -= 1
        self._stream.reply(self, reply)


def ends_some(lines: Sequence[Line[Any]]) -> bool:
    """Return whether one of these replies ends or refuses a room, so that the worker's free capacity has
    changed."""
    replies = [each for _, each in lines if each is not None]
    return any(isinstance(each, inference_pb2.Refused) or each.HasField("outcome") for each in replies)


def rooms_reply(message: Rooms, lines: Sequence[Line[Any]]) -> Rooms:
    """Add the replies `lines` to the protobuf message `message`, and return it."""
    for room, reply in lines:
        if reply is None:
            message.lines.add(room=room, absent=True)
        elif isinstance(reply, inference_pb2.Refused):
            message.lines.add(room=room, refused=reply)
        else:
            message.lines.add(room=room, reply=reply)
    return message
