"""Callers of room streams, on the leader.

A call that opens a room enters a command, and then reads from its own queue, which the leader's turn fills.
A call that ends early for any reason cancels its room, so that no room runs without a reader.
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
    """Destination of a room's replies."""

    def put_nowait(self, reply: AnyReply, /) -> None:
        """Add a reply without waiting. Raises QueueFull beyond the number of replies that a room can have."""


class Callers(Generic[Reply]):
    """Calls whose rooms have not been opened yet: at most one a room. Used from one event loop."""

    def __init__(self, mailbox: Mailbox, here: Container[RoomId]) -> None:
        """Make it without calls. `here`: rooms that are open on this worker."""
        self._mailbox = mailbox
        self._here = here
        self._waiting: dict[RoomId, Replies[Reply]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, room: RoomId) -> Replies[Reply] | None:
        """Return the destination of an opened room's replies, or None on a rank without its call."""
        return self._waiting.pop(room, None)

    async def open(self, room: RoomId, command: group_pb2.Command, replies: Replies[Reply]) -> None:
        """Open `room` by `command`. `replies` has its first reply on return.

        Raises RoomExists while another call is opening it, and whatever opening it raised. After any other
        exception, cancellation included, call `give_up`: a turn may still open the room.
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
        """Cancel a room that anyone opened. Return whether it is here once a turn took the command. Raises
        as `Mailbox.ask`."""
        await self._mailbox.ask(group_pb2.Command(cancel=request))
        return RoomId(request.room) in self._here

    def give_up(self, room: RoomId) -> None:
        """Cancel a room whose caller is gone."""
        cause = Cause(Reason.BOOTSTRAP_LOST, "the caller ended the room's stream")
        cancel = inference_pb2.CancelRequest(room=room, cause=cause_to_wire(cause))
        self._mailbox.put(group_pb2.Command(cancel=cancel))

    @asynccontextmanager
    async def calling(
        self, room: RoomId, command: group_pb2.Command, replies_max: int
    ) -> AsyncIterator[asyncio.Queue[Reply]]:
        """Open `room` by `command`, and yield the queue of its replies, which holds the first one.

        `replies_max`: bound above the number of replies that the stream can carry. Raises as `open`. On any
        exception but a refusal, cancellation included, the room is given up.
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
