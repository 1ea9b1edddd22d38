"""Calls that open rooms on a worker and read their replies, on the leader.

A call puts a command into the mailbox, and then reads replies from its own queue, which the leader's turns
fill. A call that ends early for any reason cancels its room, so that no room runs without a reader.
"""

import asyncio
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from baton.ids import RoomId
from baton.rooms.errors import Cause, PeerFault, Reason, Refusal, RoomExists
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import cause_to_wire
from baton.worker.mailbox import Mailbox

Reply = TypeVar("Reply")
AnyReply = TypeVar("AnyReply", contravariant=True)


class Replies(Protocol[AnyReply]):
    """Queue that the replies of a room go to."""

    def put_nowait(self, reply: AnyReply, /) -> None:
        """Add a reply without waiting. Raises QueueFull beyond the number of replies that a room can have."""


class Callers(Generic[Reply]):
    """gRPC calls whose rooms have not been opened yet, at most one for each room. Used from one event
    loop."""

    def __init__(self, mailbox: Mailbox, here: Container[RoomId]) -> None:
        """Make callers without calls. `here`: ids of the rooms that are open on this worker."""
        self._mailbox = mailbox
        self._here = here
        self._waiting: dict[RoomId, Replies[Reply]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, room: RoomId) -> Replies[Reply] | None:
        """Return the reply queue of the call that opened a room, and forget it. None on a rank without this
        call."""
        return self._waiting.pop(room, None)

    async def open(self, room: RoomId, command: group_pb2.Command, replies: Replies[Reply]) -> None:
        """Open a room by a command, and wait until a turn has done so. `replies` then has the first reply.

        Raises RoomExists while another call is opening the room, and any error of the command. After any
        other exception, cancellation included, call `give_up`: a turn may still open the room.
        """
        if room in self._waiting:
            raise RoomExists(f"room {room} is being opened by another call")
        self._waiting[room] = replies
        try:
            await self._mailbox.ask(command)
        finally:
            if self._waiting.get(room) is replies:
                del self._waiting[room]

    async def cancel(self, request: inference_pb2.CancelRequest) -> bool:
        """Cancel a room, whichever call opened it. Return whether the room is on this worker once a turn took
        the command. Raises the errors of `Mailbox.ask`."""
        await self._mailbox.ask(group_pb2.Command(cancel=request))
        return RoomId(request.room) in self._here

    def give_up(self, room: RoomId) -> None:
        """Cancel a room whose caller has ended its stream."""
        cause = Cause(Reason.BOOTSTRAP_LOST, "the caller ended the room's stream")
        cancel = inference_pb2.CancelRequest(room=room, cause=cause_to_wire(cause))
        self._mailbox.put(group_pb2.Command(cancel=cancel))

    @asynccontextmanager
    async def calling(
        self, room: RoomId, command: group_pb2.Command, replies_max: int
    ) -> AsyncIterator[asyncio.Queue[Reply]]:
        """Open a room by a command, and yield the queue of its replies, which has the first one.

        `replies_max`: bound above the number of replies that the stream can carry. Raises the errors of
        `open`. On any exception but a refusal, cancellation included, the room is cancelled.
        """
        replies: asyncio.Queue[Reply] = asyncio.Queue(replies_max)
        try:
            await self.open(room, command, replies)
            yield replies
        except (Refusal, PeerFault):
            raise  # the room was not opened
        except BaseException:
            self.give_up(room)
            raise
