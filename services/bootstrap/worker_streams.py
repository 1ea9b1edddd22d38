"""gRPC streams to workers, one to each worker process, which all of its rooms share.

A stream is opened with the first message. Messages of several rooms at one time travel together, so that a
token costs only its own bytes. If a stream breaks, every room on it ends with the reason, and the next room
opens a new stream. The end of a room that the worker may not have got is sent again on the next stream. That
is repeated until the worker holds the room no more, or is gone (`terminal-reaches-peer`).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import grpc

from baton.ids import Incarnation, Opener, RoomId
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
"""Length in bytes at which a message is full, so that further lines go into the next message."""
OPEN_BYTES_MAX: Final = REQUEST_BYTES_MAX - 64
"""Longest request of one room, in bytes. A longer message would break the stream, with all rooms on it."""

RETELL_S: Final = 0.05
RETELL_S_MAX: Final = 1.0
"""Longest pause before a broken stream is opened again, in seconds. The pause begins at RETELL_S and doubles
each time."""

Open: TypeAlias = inference_pb2.RunRoomRequest | inference_pb2.StreamRoomRequest


class RoomListener(Protocol):
    """Object whose methods are called with the messages about one room from its workers."""

    def on_reply(self, side: Side, reply: Any) -> None:
        """Process a message about the room that came from its worker on this side. No message follows an
        outcome."""

    def on_broken(self, side: Side, error: RemoteError) -> None:
        """Process the error of the worker on this side: it refused the room, or its stream broke. No message
        of the worker follows."""


class WorkerStreams:
    """Streams to all workers, by incarnation. Used from one event loop."""

    def __init__(
        self,
        channels: Channels,
        absent: Callable[[RoomId, Side], None],
        loaded: Callable[[Incarnation, WorkerLoad], None],
        opener: Opener,
    ) -> None:
        """Make an empty set of streams.

        `absent`: called when a worker answers the end of a room with the report that it holds nothing of it.
        `loaded`: called with a worker's report of its load. `opener`: this router, as the opener of all
        rooms.
        """
        self._opener = opener
        self._channels = channels
        self._absent = absent
        self._loaded = loaded
        self._links: dict[Incarnation, WorkerStream] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, facts: WorkerFacts) -> "WorkerStream":
        link = self._links.get(facts.incarnation)
        if link is None:
            loaded = partial(self._loaded, facts.incarnation)
            link = WorkerStream(facts, self._channels, self._absent, loaded, self._opener)
            self._links[facts.incarnation] = link
        return link

    def forget(self, incarnation: Incarnation, room: RoomId) -> None:
        """Record that a worker has nothing of a room any more."""
        link = self._links.get(incarnation)
        if link is not None:
            link.forget(room)

    def drop(self, incarnation: Incarnation) -> None:
        """Close the stream to a worker that is gone, and forget it."""
        link = self._links.pop(incarnation, None)
        if link is not None:
            link.close()

    def rooms(self) -> int:
        """Return the number of rooms that are open, or whose end is still to be sent. A room counts once for
        each of its workers."""
        return sum(len(link) for link in self._links.values())

    def over(self) -> int:
        """Return the number of ended rooms that workers may still have. A room counts once for each of its
        workers."""
        return sum(link.over for link in self._links.values())

    def close_unused(self, needed: Callable[[Incarnation], bool]) -> None:
        """Close the channels to worker processes for which `needed` returns False."""
        for incarnation in [each for each in self._channels.incarnations() if not needed(each)]:
            closing = asyncio.create_task(self._channels.drop(incarnation))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def close(self) -> None:
        for incarnation in list(self._links):
            self.drop(incarnation)


class WorkerStream:
    """Stream to one worker process, opened again after it breaks."""

    def __init__(
        self,
        facts: WorkerFacts,
        channels: Channels,
        absent: Callable[[RoomId, Side], None],
        loaded: Callable[[WorkerLoad], None],
        opener: Opener,
    ) -> None:
        self._facts = facts
        self._opener = opener
        self._channels = channels
        self._absent = absent
        self._loaded = loaded
        self._listeners: dict[RoomId, RoomListener] = {}
        self._opening: deque[Open] = deque()
        self._adopting: deque[inference_pb2.AdoptRequest] = deque()
        self._ending: deque[tuple[RoomId, int]] = deque()
        """Choices whose end is still to be sent to the worker, as (room, choice). The worker samples no more
        tokens of them then."""
        self._over: dict[RoomId, Cause] = {}
        """Ended rooms that the worker may still hold, with their causes."""
        self._unsent: deque[RoomId] = deque()
        """Ended rooms whose end has not been sent on the present stream yet."""
        self._news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._pause_s = RETELL_S

    def __len__(self) -> int:
        return len(self._listeners.keys() | self._unsent)

    @property
    def over(self) -> int:
        return len(self._over)

    def open(self, request: Open, hearer: RoomListener) -> None:
        """Send a new room to the worker. `hearer`: listener for messages about the room. It is never called
        before this function returns."""
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

    def adopt(self, request: inference_pb2.AdoptRequest, hearer: RoomListener) -> None:
        """Ask the worker for a room of another router. `hearer`: see `open`."""
        self._listeners[RoomId(request.room)] = hearer
        self._adopting.append(request)
        self._start()

    def end_choice(self, room: RoomId, choice: int) -> None:
        """Let the worker sample no more tokens of one choice of a room. The room's other choices continue."""
        if room in self._listeners:
            self._ending.append((room, choice))
            self._start()

    def cancel(self, room: RoomId, cause: Cause) -> None:
        """Send the end of a room to the worker, once. The room may have been opened by another process."""
        if room not in self._over:
            self._over[room] = cause
            self._unsent.append(room)
            self._start()

    def leave(self, room: RoomId, cause: Cause) -> None:
        """Remove the listener of a room, and send the room's end to the worker. Does nothing if the room has
        no listener."""
        if self._listeners.pop(room, None) is not None:
            self.cancel(room, cause)

    def forget(self, room: RoomId) -> None:
        """Record that the worker has nothing of the room any more. The room's end need not be sent again."""
        self._over.pop(room, None)

    def close(self) -> None:
        """End the stream and send nothing more. The listeners of its rooms get an error."""
        self._over.clear()
        self._break(RemoteError(grpc.StatusCode.CANCELLED, "", "the stream to it was closed"))
        if self.task is not None:
            self.task.cancel()

    # ---- inside

    def _start(self) -> None:
        # Sent in the loop's next round, so that messages of all rooms in this round travel together. A
        # message wakes gRPC's threads, which would otherwise compete for the interpreter in this round.
        asyncio.get_running_loop().call_soon(self._news.set)
        if self.task is None:
            self.task = asyncio.create_task(self._run(), name=f"link to {self._facts.name}")

    async def _run(self) -> None:
        """Run one gRPC stream after another, as long as there is something to send to the worker."""
        try:
            while True:
                await self._stream()
                if not self._over and not self._opening and not self._adopting:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s):
                        await self._news.wait()
                self._pause_s = min(2 * self._pause_s, RETELL_S_MAX)
        finally:
            self.task = None

    async def _stream(self) -> None:
        """Run one gRPC stream to its end."""
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
        self._adopting.clear()
        self._ending.clear()
        self._unsent = deque(self._over)
        self._news.clear()
        for room, hearer in hearers.items():
            self._deliver(room, hearer.on_broken, error)

    def _read(self, message: Any) -> None:
        self._pause_s = RETELL_S
        if message.HasField("load"):
            self._loaded(load_from_wire(message.load))  # before refusals (`full-is-no-failure`)
        for line in message.lines:
            room: RoomId = line.room
            if line.absent:
                if room in self._over:  # only if it was sent that end (`authorised-writer`)
                    self._absent(room, self._facts.side)
            elif (hearer := self._listeners.get(room)) is None:
                pass  # the room is over
            elif line.HasField("reply"):
                reply = line.reply
                if reply.HasField("outcome"):
                    del self._listeners[room]
                self._deliver(room, hearer.on_reply, reply)
            elif line.HasField("refused"):
                del self._listeners[room]
                self._deliver(room, hearer.on_broken, refusal_from_wire(line.refused))

    def _deliver(self, room: RoomId, receive: Callable[[Side, Any], None], what: object) -> None:
        """Call a room's listener. An error that it raises is logged, and ends neither the stream nor other
        rooms on it."""
        try:
            receive(self._facts.side, what)
        except Exception as error:
            log.error("a room's reply could not be taken", room=room, error=error)  # noqa: TRY400

    def _next(self) -> Any:
        """Return the next message to send to the worker, or None if there is nothing to send."""
        waiting = self._opening or self._adopting or self._unsent or self._ending
        return self._message() if waiting else None

    def _message(self) -> Any:
        """Build the next message to the worker. The end of a room or a choice is never sent before the
        message that opens the room."""
        prefill = self._facts.side is Side.PREFILL
        message: Any = inference_pb2.RunRoomsRequest() if prefill else inference_pb2.StreamRoomsRequest()
        length = 0
        while self._opening and (length := length + self._opening[0].ByteSize()) <= MESSAGE_BYTES:
            message.open.append(self._opening.popleft())
        if self._opening and not message.open:
            message.open.append(self._opening.popleft())
        while not self._opening and self._adopting and length <= MESSAGE_BYTES:
            length += self._adopting[0].ByteSize()
            message.adopt.append(self._adopting.popleft())
        while not self._opening and self._ending and length <= MESSAGE_BYTES:
            room, choice = self._ending.popleft()
            if room in self._listeners:
                part = message.end_choices.add(
                    room=room, incarnation=self._facts.incarnation, choice=choice, opener=self._opener
                )
                length += part.ByteSize()
        while not self._opening and self._unsent and length <= MESSAGE_BYTES:
            room = self._unsent.popleft()
            if room in self._over:  # else it was retired meanwhile
                part = message.cancel.add(
                    room=room,
                    incarnation=self._facts.incarnation,
                    cause=cause_to_wire(self._over[room]),
                    opener=self._opener,
                )
                length += part.ByteSize()
        return message
