"""gRPC service that opens rooms on a worker: one room for each call, or many on one stream.

It decides nothing. It parses requests, puts commands into the mailbox and renders replies.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import grpc

from baton.ids import Opener
from baton.rooms.phases import Side
from baton.wire.baton.v1 import group_pb2, inference_pb2, rooms_pb2
from baton.wire.channel import check_incarnation
from baton.wire.conversions import room_from_wire
from baton.wire.errors import Draining, errors_as_status
from baton.worker.assembly import RankPorts
from baton.worker.callers import Callers
from baton.worker.shared_stream import Rest, SharedStream, ends_some, rooms_reply

Reply = TypeVar("Reply", inference_pb2.RunRoomReply, inference_pb2.StreamRoomReply)


class RoomSide(Protocol[Reply]):
    """Interface of a prefill or decode side towards the service that opens rooms: its reply queues, its load,
    and whether it is draining."""

    ports: RankPorts
    callers: Callers[Reply]

    @property
    def draining(self) -> bool: ...

    def load(self, opener: Opener | None = None) -> rooms_pb2.WorkerLoad: ...


class RoomOpeningService(ABC, Generic[Reply]):
    """Base class of the gRPC services of prefill and decode workers that open rooms."""

    side: ClassVar[Side]
    message: ClassVar[type[Any]]
    """Class of the protobuf messages that a stream with many rooms sends to its caller."""

    def __init__(self, work: RoomSide[Reply], rest: Rest | None = None) -> None:
        """Make the service of a prefill or decode worker. `rest`: handler of message parts that neither open
        nor cancel rooms (see `SharedStream`)."""
        self._callers: Callers[Reply] = work.callers
        self._work: RoomSide[Reply] = work
        self._mailbox = work.ports.mailbox
        self._incarnation = work.ports.incarnation
        self._rest = rest

    @abstractmethod
    def opening(self, request: Any) -> tuple[group_pb2.Command, int]:
        """Return the command that opens the room of a request, and the most replies that the room can have.

        Raises a Refusal. The turn that takes the command checks the request itself.
        """

    async def room(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
        """Open the room of one call, and yield its replies up to the last one, the outcome."""
        async with errors_as_status(context):
            command, most = self._judge(request)
            room, opener = room_from_wire(request.room), Opener(request.opener)
            async with self._callers.calling(room, opener, command, most) as replies:
                over = False
                while not over:
                    reply = await replies.get()
                    yield reply
                    over = reply.HasField("outcome")

    async def rooms(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Serve one stream on which a caller opens many rooms. Yield messages with the replies of all of
        them."""
        shared = SharedStream(self._callers, self._judge, self._incarnation, self._rest)
        async with (
            errors_as_status(context),
            shared.reading(request_iterator),
            aclosing(shared.lines()) as messages,
        ):
            async for lines in messages:
                load = self._work.load(shared.opener) if ends_some(lines) else None
                yield rooms_reply(self.message() if load is None else self.message(load=load), lines)

    def _judge(self, request: Any) -> tuple[group_pb2.Command, int]:
        check_incarnation(self._incarnation, request.incarnation)
        if self._work.draining:
            raise Draining(f"this {self.side.value} worker is draining")
        room_from_wire(request.room)
        return self.opening(request)
