"""Calls that open rooms on a worker and read their replies, on the leader.

A call puts a command into the mailbox, and then reads replies from its own queue, which the leader's turns
fill. A call that ends early for any reason cancels its room, so that no room runs without a reader.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Generic, Protocol, TypeVar

from baton.ids import Opener, RoomId
from baton.rooms.errors import Cause, PeerFault, Reason, Refusal, RoomExists
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import cause_to_wire
from baton.worker.mailbox import Mailbox

STREAM_ENDED: Final = Cause(Reason.BOOTSTRAP_LOST, "the caller ended the room's stream")

Reply = TypeVar("Reply")
AnyReply = TypeVar("AnyReply", contravariant=True)


class Replies(Protocol[AnyReply]):
    """Queue that receives the replies of one room, in order."""

    def put_nowait(self, reply: AnyReply, /) -> None:
        """Add a reply without waiting. Raises QueueFull if the room already had its largest possible number
        of replies."""


class Callers(Generic[Reply]):
    """gRPC calls that wait for a turn to open their rooms, at most one call for each room. Used from one
    event loop."""

    def __init__(self, mailbox: Mailbox, is_here: Callable[[RoomId, Opener], bool]) -> None:
        """Make callers without calls. `is_here`: returns whether a room of a router is open on this
        worker."""
        self._mailbox = mailbox
        self._is_here = is_here
        self._waiting: dict[RoomId, Replies[Reply]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, room: RoomId) -> Replies[Reply] | None:
        """Return the reply queue of the call that waits for this room to open, and forget the call. Return
        None if this rank has no such call."""
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
            await self._mailbox.submit(command)
        finally:
            if self._waiting.get(room) is replies:
                del self._waiting[room]

    async def cancel(self, request: inference_pb2.CancelRequest) -> bool:
        """Cancel a room, whichever call opened it. Return whether the room of that opener is on this worker
        once a turn took the command. Raises the errors of `Mailbox.ask`."""
        await self._mailbox.submit(group_pb2.Command(cancel=request))
        return self._is_here(RoomId(request.room), Opener(request.opener))

    def give_up(self, room: RoomId, opener: Opener) -> None:
        """Cancel a room of a router, because its caller's stream has ended."""
        cancel = inference_pb2.CancelRequest(room=room, cause=cause_to_wire(STREAM_ENDED), opener=opener)
        self._mailbox.put(group_pb2.Command(cancel=cancel))

    def orphan(self, room: RoomId, opener: Opener) -> None:
        """Let other routers adopt a room of a router for a while, because its caller's stream has ended."""
        orphan = inference_pb2.CancelRequest(room=room, cause=cause_to_wire(STREAM_ENDED), opener=opener)
        self._mailbox.put(group_pb2.Command(orphan=orphan))

    @asynccontextmanager
    async def calling(
        self, room: RoomId, opener: Opener, command: group_pb2.Command, replies_max: int
    ) -> AsyncIterator[asyncio.Queue[Reply]]:
        """Open a room by a command, and yield the queue of the room's replies. The first reply is already in
        it.

        `replies_max`: upper bound on the number of replies of the room. Raises the errors of `open`. On any
        exception but a refusal, cancellation included, the room is cancelled.
        """
        replies: asyncio.Queue[Reply] = asyncio.Queue(replies_max)
        try:
            await self.open(room, command, replies)
            yield replies
        except (Refusal, PeerFault):
            raise  # the room was not opened
        except BaseException:
            self.give_up(room, opener)
            raise
