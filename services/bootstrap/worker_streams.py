"""How does the bootstrap speak with one worker of many rooms at a time?

Over one stream to each process of a worker, opened with the first that it is told and kept: what several
rooms are told, or have to say, at one time travels in one message, so that a token costs no more than its own
bytes. A stream that breaks ends every room on it, with the reason why it broke; the next room gets a new one.
What the worker was told of rooms that are over, and may not have heard, is told again on the next stream,
until it is known that the worker holds them no more or is gone (`terminal-reaches-peer`).
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
"""From this length on what else is to be sent goes into the next message."""
OPEN_BYTES_MAX: Final = REQUEST_BYTES_MAX - 64
"""Of one room: a longer message would end the stream, and with it the other rooms on it."""

RETELL_S: Final = 0.05
RETELL_S_MAX: Final = 1.0
"""How soon a stream that broke is followed by another, if there is something to be told: later each time."""

Open: TypeAlias = inference_pb2.RunRoomRequest | inference_pb2.StreamRoomRequest


class RoomListener(Protocol):
    """Who follows one room on its workers."""

    def on_reply(self, side: Side, reply: Any) -> None:
        """The worker of that side said something of the room. It says nothing after an outcome."""

    def on_broken(self, side: Side, error: RemoteError) -> None:
        """The worker of that side refused the room, or its stream broke: it says nothing more."""


class WorkerStreams:
    """One link to each incarnation of a worker that was told something. Used from one event loop."""

    def __init__(
        self,
        channels: Channels,
        absent: Callable[[RoomId, Side], None],
        loaded: Callable[[Incarnation, WorkerLoad], None],
    ) -> None:
        """`absent`: told where a worker holds nothing of a room that it was told is over. `loaded`: told what
        a worker says of its load."""
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
        """The worker holds nothing of the room any more."""
        link = self._links.get(incarnation)
        if link is not None:
            link.forget(room)

    def drop(self, incarnation: Incarnation) -> None:
        """The worker is gone, or about to exit: nothing is heard of it any more."""
        link = self._links.pop(incarnation, None)
        if link is not None:
            link.close()

    def rooms(self) -> int:
        """Of which something is to be told, or may be heard yet, counted on each of their workers."""
        return sum(len(link) for link in self._links.values())

    def over(self) -> int:
        """Rooms of which it is not known yet that their workers hold nothing of them, counted likewise."""
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
    """The stream to one process of one worker."""

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
        self._hearers: dict[RoomId, RoomListener] = {}
        self._opening: deque[Open] = deque()
        self._ending: deque[tuple[RoomId, int]] = deque()
        """Choices of rooms on this stream that are complete for their readers."""
        self._over: dict[RoomId, Cause] = {}
        """Rooms that are over, and that the worker may hold."""
        self._untold: deque[RoomId] = deque()
        """Those of them that it was not told of, on this stream."""
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pause_s = RETELL_S

    def __len__(self) -> int:
        return len(self._hearers.keys() | self._untold)

    @property
    def over(self) -> int:
        return len(self._over)

    def open(self, request: Open, hearer: RoomListener) -> None:
        """Ask the worker for a room. `hearer` is told what comes of it, never before this returns."""
        room = RoomId(request.room)
        length = request.ByteSize()
        if length > OPEN_BYTES_MAX:
            text = f"the request takes {length} bytes, at most {OPEN_BYTES_MAX} are taken"
            error = RemoteError(grpc.StatusCode.INVALID_ARGUMENT, CommandTooLong.__name__, text)
            asyncio.get_running_loop().call_soon(self._deliver, room, hearer.on_broken, error)
            return
        self._hearers[room] = hearer
        self._opening.append(request)
        self._start()

    def end_choice(self, room: RoomId, choice: int) -> None:
        """One choice of a room that was opened on this stream is complete; the others go on."""
        if room in self._hearers:
            self._ending.append((room, choice))
            self._start()

    def cancel(self, room: RoomId, cause: Cause) -> None:
        """The room is over, whoever opened it: the worker is told why, once, until it is to be forgotten."""
        if room not in self._over:
            self._over[room] = cause
            self._untold.append(room)
            self._start()

    def leave(self, room: RoomId, cause: Cause) -> None:
        """Nothing more of this room is heard; it is over. Does nothing for one that is not heard any more."""
        if self._hearers.pop(room, None) is not None:
            self.cancel(room, cause)

    def forget(self, room: RoomId) -> None:
        """The worker holds nothing of the room any more: there is nothing to be told."""
        self._over.pop(room, None)

    def close(self) -> None:
        """End the stream; whoever still hears of a room is told so. Nothing is told any more."""
        self._over.clear()
        self._break(RemoteError(grpc.StatusCode.CANCELLED, "", "the stream to it was closed"))
        if self._task is not None:
            self._task.cancel()

    # ---- inside

    def _start(self) -> None:
        # In the loop's next round: what the rooms of this one have to say travels together then, and gRPC's
        # threads, which a message wakes, do not ask for the interpreter in the midst of it.
        asyncio.get_running_loop().call_soon(self._news.set)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"link to {self._facts.name}")

    async def _run(self) -> None:
        """One stream after another, while there is something to be told."""
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
            self._task = None

    async def _stream(self) -> None:
        """One stream, to its end."""
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
        hearers, self._hearers = self._hearers, {}
        self._opening.clear()
        self._ending.clear()
        self._untold = deque(self._over)
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
            hearer = self._hearers.get(room)
            if hearer is None:
                continue  # of a room that is over
            if line.HasField("refused"):
                del self._hearers[room]
                self._deliver(room, hearer.on_broken, refusal_from_wire(line.refused))
                continue
            reply = line.reply
            if reply.HasField("outcome"):
                del self._hearers[room]
            self._deliver(room, hearer.on_reply, reply)
        if message.HasField("load"):
            self._loaded(load_from_wire(message.load))

    def _deliver(self, room: RoomId, hear: Callable[[Side, Any], None], what: object) -> None:
        """One room's trouble ends neither the stream nor the other rooms on it."""
        try:
            hear(self._facts.side, what)
        except Exception as error:
            log.error("a room's reply could not be taken", room=room, error=error)  # noqa: TRY400

    def _next(self) -> Any:
        """What is sent next, if anything."""
        return self._message() if self._opening or self._untold or self._ending else None

    def _message(self) -> Any:
        """What is sent next. That a room, or a choice of it, is over is told in the message that opens it or
        in a later one."""
        prefill = self._facts.side is Side.PREFILL
        message: Any = inference_pb2.RunRoomsRequest() if prefill else inference_pb2.StreamRoomsRequest()
        length = 0
        while self._opening and (length := length + self._opening[0].ByteSize()) <= MESSAGE_BYTES:
            message.open.append(self._opening.popleft())
        if self._opening and not message.open:
            message.open.append(self._opening.popleft())
        while not self._opening and self._ending and length <= MESSAGE_BYTES:
            room, choice = self._ending.popleft()
            if room in self._hearers:
                told = message.end_choices.add(room=room, incarnation=self._facts.incarnation, choice=choice)
                length += told.ByteSize()
        while not self._opening and self._untold and length <= MESSAGE_BYTES:
            room = self._untold.popleft()
            if room in self._over:  # else it was retired meanwhile
                told = message.cancel.add(
                    room=room, incarnation=self._facts.incarnation, cause=cause_to_wire(self._over[room])
                )
                length += told.ByteSize()
        return message
