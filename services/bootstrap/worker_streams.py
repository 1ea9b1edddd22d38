"""Streams to workers, one for each process, which all of its rooms share.

A stream is opened with the first message. Messages of several rooms at one time travel together, so that a
token costs only its own bytes. A stream that breaks ends every room on it with the reason, and the next room
opens a new one. Ends of rooms that the worker may not have got are sent again on the next stream. That goes
on until the worker is known to hold them no more, or to be gone (`terminal-reaches-peer`).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import grpc

from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WorkerFacts
from baton.rooms.worker_load import WorkerLoad
from baton.runtime.logging import Log
from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc
from baton.wire.channel import REQUEST_BYTES_MAX, Channels
from baton.wire.conversions import cause_to_wire
from baton.wire.duplex_stream import run_duplex
from baton.wire.errors import CommandTooLong, RemoteError, refusal_from_wire
from baton.wire.load_messages import load_from_wire
from baton.wire.service_role import ServiceRole

log = Log(__name__)

MESSAGE_BYTES: Final = 1 << 20
"""Length from which on further lines go into the next message, in bytes."""
OPEN_BYTES_MAX: Final = REQUEST_BYTES_MAX - 64
"""Most bytes of one room's request. A longer message would end the stream with all rooms on it."""

RETELL_S: Final = 0.05
RETELL_S_MAX: Final = 1.0
"""Longest pause before a broken stream is opened again, if there is something to send, in seconds. The pause
grows each time."""

Open: TypeAlias = inference_pb2.RunRoomRequest | inference_pb2.StreamRoomRequest


class RoomListener(Protocol):
    """Follower of one room on its workers."""

    def on_reply(self, side: Side, reply: Any) -> None:
        """Take a message of the worker of a side. None follows an outcome."""

    def on_broken(self, side: Side, error: RemoteError) -> None:
        """Take the error of a worker that refused the room, or whose stream broke. No message follows."""


class WorkerStreams:
    """Streams by incarnation of the worker. Used from one event loop."""

    def __init__(
        self,
        channels: Channels,
        absent: Callable[[RoomId, Side], None],
        loaded: Callable[[Incarnation, WorkerLoad], None],
    ) -> None:
        """`absent`: called when a worker holds nothing of a room whose end it got. `loaded`: called
        with a worker's report of its load."""
        self._channels = channels
        self._absent = absent
        self._loaded = loaded
        self._links: dict[Incarnation, WorkerStream] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, facts: WorkerFacts) -> "WorkerStream":
        link = self._links.get(facts.incarnation)
        if link is None:
            loaded = partial(self._loaded, facts.incarnation)
            link = WorkerStream(facts, self._channels, self._absent, loaded)
            self._links[facts.incarnation] = link
        return link

    def forget(self, incarnation: Incarnation, room: RoomId) -> None:
        """Note that a worker holds nothing of a room any more."""
        link = self._links.get(incarnation)
        if link is not None:
            link.forget(room)

    def drop(self, incarnation: Incarnation) -> None:
        """Close the stream to a worker that is gone or about to exit."""
        link = self._links.pop(incarnation, None)
        if link is not None:
            link.close()

    def rooms(self) -> int:
        """Return the number of rooms with messages to come, counted on each of their workers."""
        return sum(len(link) for link in self._links.values())

    def over(self) -> int:
        """Return the number of ended rooms that their workers may still hold, counted on each of them."""
        return sum(link.over for link in self._links.values())

    def close_unused(self, needed: Callable[[Incarnation], bool]) -> None:
        """Close the channels to processes that are not needed any more."""
        for incarnation in [each for each in self._channels.incarnations() if not needed(each)]:
            closing = asyncio.create_task(self._channels.drop(incarnation))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def close(self) -> None:
        for incarnation in list(self._links):
            self.drop(incarnation)


class WorkerStream:
    """Stream to one process of one worker."""

    def __init__(
        self,
        facts: WorkerFacts,
        channels: Channels,
        absent: Callable[[RoomId, Side], None],
        loaded: Callable[[WorkerLoad], None],
    ) -> None:
        self._facts = facts
        self._channels = channels
        self._absent = absent
        self._loaded = loaded
        self._listeners: dict[RoomId, RoomListener] = {}
        self._opening: deque[Open] = deque()
        self._ending: deque[tuple[RoomId, int]] = deque()
        """Choices of rooms on this stream that their readers need no more of."""
        self._over: dict[RoomId, Cause] = {}
        """Ended rooms that the worker may hold, with their causes."""
        self._unsent: deque[RoomId] = deque()
        """Ended rooms that were not sent on this stream yet."""
        self._news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._pause_s = RETELL_S

    def __len__(self) -> int:
        return len(self._listeners.keys() | self._unsent)

    @property
    def over(self) -> int:
        return len(self._over)

    def open(self, request: Open, hearer: RoomListener) -> None:
        """Ask the worker for a room. `hearer` is called with its messages, never before this returns."""
        room = RoomId(request.room)
        length = request.ByteSize()
        if length > OPEN_BYTES_MAX:
            text = f"the request takes {length} bytes, at most {OPEN_BYTES_MAX} are taken"
            error = RemoteError(grpc.StatusCode.INVALID_ARGUMENT, CommandTooLong.__name__, text)
            asyncio.get_running_loop().call_soon(self._deliver, room, hearer.on_broken, error)
            return
        self._listeners[room] = hearer
        self._opening.append(request)
        self._start()

    def end_choice(self, room: RoomId, choice: int) -> None:
        """End one choice of a room on this stream. The others go on."""
        if room in self._listeners:
            self._ending.append((room, choice))
            self._start()

    def cancel(self, room: RoomId, cause: Cause) -> None:
        """Send the end of a room, once, whoever opened it."""
        if room not in self._over:
            self._over[room] = cause
            self._unsent.append(room)
            self._start()

    def leave(self, room: RoomId, cause: Cause) -> None:
        """Stop listening to a room, and end it. Nothing happens if it has no listener."""
        if self._listeners.pop(room, None) is not None:
            self.cancel(room, cause)

    def forget(self, room: RoomId) -> None:
        """Note that the worker holds nothing of the room any more, so that its end need not be sent."""
        self._over.pop(room, None)

    def close(self) -> None:
        """End the stream, and send nothing any more. Listeners of rooms get an error."""
        self._over.clear()
        self._break(RemoteError(grpc.StatusCode.CANCELLED, "", "the stream to it was closed"))
        if self.task is not None:
            self.task.cancel()

    # ---- inside

    def _start(self) -> None:
        # In the loop's next round: what the rooms of this one have to say travels together then, and gRPC's
        # threads, which a message wakes, do not ask for the interpreter in the midst of it.
        asyncio.get_running_loop().call_soon(self._news.set)
        if self.task is None:
            self.task = asyncio.create_task(self._run(), name=f"link to {self._facts.name}")

    async def _run(self) -> None:
        """Run one stream after another, while there is something to send."""
        try:
            while True:
                await self._stream()
                if not self._over and not self._opening:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s):
                        await self._news.wait()
                self._pause_s = min(2 * self._pause_s, RETELL_S_MAX)
        finally:
            self.task = None

    async def _stream(self) -> None:
        """Run one stream to its end."""
        channel = self._channels.to(
            self._facts.address, ServiceRole.of(self._facts.side), self._facts.incarnation
        )
        if self._facts.side is Side.PREFILL:
            call = inference_pb2_grpc.PrefillServiceStub(channel).RunRooms()
        else:
            call = inference_pb2_grpc.DecodeServiceStub(channel).StreamRooms()
        error = RemoteError(grpc.StatusCode.CANCELLED, "", "the stream to it was closed")
        try:
            error = await run_duplex(call, self._news, self._next, self._read)
        finally:
            self._break(error)

    def _break(self, error: RemoteError) -> None:
        hearers, self._listeners = self._listeners, {}
        self._opening.clear()
        self._ending.clear()
        self._unsent = deque(self._over)
        self._news.clear()
        for room, hearer in hearers.items():
            self._deliver(room, hearer.on_broken, error)

    def _read(self, message: Any) -> None:
        self._pause_s = RETELL_S
        for line in message.lines:
            room = RoomId(line.room)
            if line.absent:
                if room in self._over:  # a worker speaks of what it was told is over (`authorised-writer`)
                    self._absent(room, self._facts.side)
                continue
            hearer = self._listeners.get(room)
            if hearer is None:
                continue  # of a room that is over
            if line.HasField("refused"):
                del self._listeners[room]
                self._deliver(room, hearer.on_broken, refusal_from_wire(line.refused))
                continue
            reply = line.reply
            if reply.HasField("outcome"):
                del self._listeners[room]
            self._deliver(room, hearer.on_reply, reply)
        if message.HasField("load"):
            self._loaded(load_from_wire(message.load))

    def _deliver(self, room: RoomId, receive: Callable[[Side, Any], None], what: object) -> None:
        """Call a room's listener. Its error ends neither the stream nor other rooms on it."""
        try:
            receive(self._facts.side, what)
        except Exception as error:
            log.error("a room's reply could not be taken", room=room, error=error)  # noqa: TRY400

    def _next(self) -> Any:
        """Return the next message to send, or None."""
        return self._message() if self._opening or self._unsent or self._ending else None

    def _message(self) -> Any:
        """Build the next message. The end of a room or of a choice goes in the message that opens it, or in a
        later one."""
        prefill = self._facts.side is Side.PREFILL
        message: Any = inference_pb2.RunRoomsRequest() if prefill else inference_pb2.StreamRoomsRequest()
        length = 0
        while self._opening and (length := length + self._opening[0].ByteSize()) <= MESSAGE_BYTES:
            message.open.append(self._opening.popleft())
        if self._opening and not message.open:
            message.open.append(self._opening.popleft())
        while not self._opening and self._ending and length <= MESSAGE_BYTES:
            room, choice = self._ending.popleft()
            if room in self._listeners:
                part = message.end_choices.add(room=room, incarnation=self._facts.incarnation, choice=choice)
                length += part.ByteSize()
        while not self._opening and self._unsent and length <= MESSAGE_BYTES:
            room = self._unsent.popleft()
            if room in self._over:  # else it was retired meanwhile
                part = message.cancel.add(
                    room=room, incarnation=self._facts.incarnation, cause=cause_to_wire(self._over[room])
                )
                length += part.ByteSize()
        return message
