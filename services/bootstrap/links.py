"""How does the bootstrap speak with one worker of many rooms at a time?

Over one stream to each process of a worker, opened with its first room and kept: what several rooms are told,
or have to say, at one time travels in one message, so that a token costs no more than its own bytes. A stream
that breaks ends every room on it, with the reason why it broke; the next room gets a new one.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import grpc

from services.rooms.ids import Incarnation, RoomId
from services.rooms.phases import Side
from services.rooms.registry import WorkerFacts
from services.runtime.logging import Log
from services.runtime.party import Party
from services.wire.baton.v1 import inference_pb2, inference_pb2_grpc
from services.wire.channel import REQUEST_BYTES_MAX, Channels
from services.wire.errors import RemoteError, refusal_from_wire, remote_error
from services.wire.mailbox import CommandTooLong

log = Log(__name__)

MESSAGE_BYTES: Final = 1 << 20
"""From this length on what else is to be sent goes into the next message."""
OPEN_BYTES_MAX: Final = REQUEST_BYTES_MAX - 64
"""Of one room: a longer message would end the stream, and with it the other rooms on it."""

Open: TypeAlias = inference_pb2.RunRoomRequest | inference_pb2.StreamRoomRequest
Reply: TypeAlias = inference_pb2.RunRoomReply | inference_pb2.StreamRoomReply


class Hearer(Protocol):
    """Who follows one room on one worker."""

    def heard(self, reply: Any) -> None:
        """Nothing follows an outcome."""

    def broken(self, error: RemoteError) -> None:
        """Nothing follows: the room was refused, or the stream broke."""


class Links:
    """One link to each incarnation of a worker that has had a room. Used from one event loop."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._links: dict[Incarnation, Link] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def to(self, facts: WorkerFacts) -> "Link":
        link = self._links.get(facts.incarnation)
        if link is None:
            link = self._links[facts.incarnation] = Link(facts, self._channels)
        return link

    def drop(self, incarnation: Incarnation) -> None:
        """The worker is gone, or about to exit: nothing is heard of it any more."""
        link = self._links.pop(incarnation, None)
        if link is not None:
            link.close()

    def rooms(self) -> int:
        """Of which something may be heard yet, counted on each of their workers."""
        return sum(len(link) for link in self._links.values())

    def close(self) -> None:
        for incarnation in list(self._links):
            self.drop(incarnation)


class Link:
    """The stream to one process of one worker."""

    def __init__(self, facts: WorkerFacts, channels: Channels) -> None:
        self._facts = facts
        self._channels = channels
        self._hearers: dict[RoomId, Hearer] = {}
        self._opening: deque[Open] = deque()
        self._leaving: list[RoomId] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._hearers)

    def open(self, request: Open, hearer: Hearer) -> None:
        """Ask the worker for a room. `hearer` is told what comes of it, never before this returns."""
        room = RoomId(request.room)
        length = request.ByteSize()
        if length > OPEN_BYTES_MAX:
            text = f"the request takes {length} bytes, at most {OPEN_BYTES_MAX} are taken"
            error = RemoteError(grpc.StatusCode.INVALID_ARGUMENT, CommandTooLong.__name__, text)
            asyncio.get_running_loop().call_soon(_tell, room, hearer.broken, error)
            return
        self._hearers[room] = hearer
        self._opening.append(request)
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"link to {self._facts.name}")

    def leave(self, room: RoomId) -> None:
        """Nothing more of this room is wanted; it ends. Does nothing for one that is not heard any more."""
        if self._hearers.pop(room, None) is not None:
            self._leaving.append(room)
            self._news.set()

    def close(self) -> None:
        """End the stream; whoever still hears of a room is told so. Nothing is opened any more."""
        self._break(RemoteError(grpc.StatusCode.CANCELLED, "", "the stream to it was closed"))
        if self._task is not None:
            self._task.cancel()

    # ---- inside

    async def _run(self) -> None:
        """One stream, from its first room to its end."""
        channel = self._channels.to(self._facts.address, Party.of(self._facts.side), self._facts.incarnation)
        if self._facts.side is Side.PREFILL:
            call = inference_pb2_grpc.PrefillServiceStub(channel).RunRooms()
        else:
            call = inference_pb2_grpc.DecodeServiceStub(channel).StreamRooms()
        writer = asyncio.create_task(self._write(call))
        error = RemoteError(grpc.StatusCode.OK, "", "it ended the stream")
        try:
            await self._read(call)
        except grpc.aio.AioRpcError as broke:
            error = remote_error(broke)
        except Exception as bug:
            error = RemoteError(grpc.StatusCode.INTERNAL, "", f"the stream could not be read: {bug!r}")
            log.error(  # noqa: TRY400
                "the stream to a worker could not be read", error=bug, worker=self._facts.name
            )
        finally:
            call.cancel()  # grpc alone leaves some running, so that the worker never hears of it
            writer.cancel()
            self._task = None
            self._break(error)

    def _break(self, error: RemoteError) -> None:
        hearers, self._hearers = self._hearers, {}
        self._opening.clear()
        self._leaving.clear()
        self._news.clear()
        for room, hearer in hearers.items():
            _tell(room, hearer.broken, error)

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        async for message in call:
            for line in message.lines:
                room = RoomId(line.room)
                hearer = self._hearers.get(room)
                if hearer is None:
                    continue  # of a room that was left meanwhile
                if line.HasField("refused"):
                    del self._hearers[room]
                    _tell(room, hearer.broken, refusal_from_wire(line.refused))
                    continue
                reply = line.reply
                if reply.HasField("outcome"):
                    del self._hearers[room]
                _tell(room, hearer.heard, reply)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._opening or self._leaving:
                    await call.write(self._message())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader hears why

    def _message(self) -> Any:
        """What is sent next. Rooms are left in the message that opens them or in a later one."""
        prefill = self._facts.side is Side.PREFILL
        message: Any = inference_pb2.RunRoomsRequest() if prefill else inference_pb2.StreamRoomsRequest()
        length = 0
        while self._opening and (length := length + self._opening[0].ByteSize()) <= MESSAGE_BYTES:
            message.open.append(self._opening.popleft())
        if self._opening and not message.open:
            message.open.append(self._opening.popleft())
        if not self._opening:
            message.leave.extend(self._leaving)
            self._leaving.clear()
        return message


def _tell(room: RoomId, hear: Callable[[Any], None], what: object) -> None:
    """One room's trouble ends neither the stream nor the other rooms on it."""
    try:
        hear(what)
    except Exception as error:
        log.error("a room's reply could not be taken", room=room, error=error)  # noqa: TRY400
