"""How do many rooms of one caller share one stream?

What they have to say is collected until the stream can take a message: the tokens of one engine step, which
its rooms say at once, leave together. A caller that takes nothing is waited for; what waits for it is bounded
by what its rooms can ever say.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeAlias, TypeVar

from baton.ids import Incarnation, RoomId
from baton.rooms.errors import PeerFault, Refusal
from baton.runtime.logging import Log
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.channel import check_incarnation
from baton.wire.errors import refusal_to_wire
from baton.worker.callers import Callers

log = Log(__name__)

LINES_MAX: Final = 1024
"""Of one message."""
MESSAGE_BYTES: Final = 2**15
"""From this length on what else is said goes into the next message. Who reads it takes each at once, and all
others wait for that: log-probabilities of so many bytes take milliseconds, and of a prompt or of a whole
vocabulary there may be megabytes."""

Reply = TypeVar("Reply", inference_pb2.RunRoomReply, inference_pb2.StreamRoomReply)
Rooms = TypeVar("Rooms", inference_pb2.RunRoomsReply, inference_pb2.StreamRoomsReply)
Line: TypeAlias = tuple[RoomId, Reply | inference_pb2.Refused | None]
"""None: the room was cancelled, and is not here."""
Judge: TypeAlias = Callable[[Any], tuple[group_pb2.Command, int]]
"""Of a request to open a room: the command that opens it, and how many replies it can have. Raises a
Refusal."""
Rest: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]
"""Raises what a mailbox does."""


class SharedStream(Generic[Reply]):
    """One caller's stream. When it is left, the rooms on it that have not ended are cancelled."""

    def __init__(
        self, callers: Callers[Reply], judge: Judge, incarnation: Incarnation, rest: Rest | None = None
    ) -> None:
        """`incarnation`: of this process. `rest`: takes what else a message asks for than to open and to
        cancel rooms."""
        self._rest = rest
        self._callers: Callers[Reply] = callers
        self._judge = judge
        self._incarnation = incarnation
        self._rooms: dict[RoomId, _RoomReplies[Reply]] = {}
        """Rooms that have something to say yet."""
        self._said: deque[Line[Reply]] = deque()
        self._news = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def reading(self, requests: AsyncIterator[Any]) -> AsyncIterator["SharedStream[Reply]"]:
        """Open and cancel rooms as `requests` say."""
        self._reading = asyncio.create_task(self._read(requests))
        self._reading.add_done_callback(lambda _: self._news.set())
        try:
            yield self
        finally:
            rooms, self._rooms = list(self._rooms), {}
            for room in rooms:
                self._callers.give_up(room)
            tasks = [self._reading, *self._asking]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def lines(self) -> AsyncGenerator[Sequence[Line[Reply]], None]:
        """What is to be said, a message at a time, until the requests have ended and every room has. Raises
        what ended the requests early."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._said:
                yield self._next()
            if self._reading is not None and self._reading.done():
                self._reading.result()
                if not self._rooms and not self._said and not self._asking:
                    return

    def _next(self) -> Sequence[Line[Reply]]:
        lines: list[Line[Reply]] = []
        length = 0
        while self._said and len(lines) < LINES_MAX and length < MESSAGE_BYTES:
            line = self._said.popleft()
            lines.append(line)
            length += 0 if line[1] is None else line[1].ByteSize()
        return lines

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            for each in request.open:
                self._open(each)
            for each in request.cancel:
                self._start(self._cancel(each))  # behind the opening of its room, which was started before
            if self._rest is not None:
                self._start(self._take_rest(self._rest, request))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._asking.add(task)
        task.add_done_callback(self._asked)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        self._news.set()

    def _open(self, request: Any) -> None:
        room = RoomId(request.room)
        if room in self._rooms:
            log.warning("a room was opened twice on one stream", room=room)
            return  # its replies are the first one's: a refusal would be taken for that one's end
        try:
            command, most = self._judge(request)
        except Exception as error:
            self._refuse(room, error)
            return
        voice = self._rooms[room] = _RoomReplies(self, room, most)
        self._start(self._enter(voice, command))

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

    async def _enter(self, voice: "_RoomReplies[Reply]", command: group_pb2.Command) -> None:
        try:
            await self._callers.open(voice.room, command, voice)
        except Exception as error:
            if self._rooms.get(voice.room) is not voice:
                return  # the stream has ended meanwhile, and the room was given up with it
            del self._rooms[voice.room]
            if not isinstance(error, Refusal | PeerFault):
                self._callers.give_up(voice.room)  # a turn may open it yet
            self._refuse(voice.room, error)

    def _refuse(self, room: RoomId, error: Exception) -> None:
        refused = refusal_to_wire(error)
        if not refused.kind:
            log.error("a room could not be opened", room=room, error=error)
        self._enqueue(room, refused)

    def _enqueue(self, room: RoomId, said: Reply | inference_pb2.Refused | None) -> None:
        self._said.append((room, said))
        self._news.set()

    def reply(self, voice: "_RoomReplies[Reply]", reply: Reply) -> None:
        """By a room of this stream. Of one that has ended nothing is passed on."""
        if self._rooms.get(voice.room) is not voice:
            return
        if reply.HasField("outcome"):
            del self._rooms[voice.room]
        self._enqueue(voice.room, reply)


class _RoomReplies(Generic[Reply]):
    """Where one room says what it has to say."""

    __slots__ = ("_left", "_stream", "room")

    def __init__(self, stream: SharedStream[Reply], room: RoomId, replies_max: int) -> None:
        self._stream: SharedStream[Reply] = stream
        self._left = replies_max
        self.room = room

    def put_nowait(self, reply: Reply) -> None:
        """Raises QueueFull when the room says more than it can have to say."""
        if self._left == 0:
            raise asyncio.QueueFull
        self._left -= 1
        self._stream.reply(self, reply)


def ends_some(lines: Sequence[Line[Any]]) -> bool:
    """A room among them ended, or was refused: the worker has other space than before."""
    said = [each for _, each in lines if each is not None]
    return any(isinstance(each, inference_pb2.Refused) or each.HasField("outcome") for each in said)


def rooms_reply(message: Rooms, lines: Sequence[Line[Any]]) -> Rooms:
    """`message` with `lines`."""
    for room, said in lines:
        if said is None:
            message.lines.add(room=room, absent=True)
        elif isinstance(said, inference_pb2.Refused):
            message.lines.add(room=room, refused=said)
        else:
            message.lines.add(room=room, reply=said)
    return message
