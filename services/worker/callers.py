"""How does the caller of a room's stream hear of its room, and the room of its caller?

A call that opens a room enters a command and then reads from a queue of its own, which the leader's turn
fills. A call that ends early, for whatever reason, cancels its room: nothing goes on that nobody hears.
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
    """Where a room's replies go."""

    def put_nowait(self, reply: AnyReply, /) -> None:
        """Never waits. Raises QueueFull for more replies than a room can have."""


class Callers(Generic[Reply]):
    """Calls whose rooms have not been opened yet: at most one a room. Used from one event loop."""

    def __init__(self, mailbox: Mailbox, here: Container[RoomId]) -> None:
        """`here`: the rooms that were opened, and not given back."""
        self._mailbox = mailbox
        self._here = here
        self._waiting: dict[RoomId, Replies[Reply]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, room: RoomId) -> Replies[Reply] | None:
        """The room was opened: where its replies go from now on. None on a rank that nobody called."""
        return self._waiting.pop(room, None)

    async def open(self, room: RoomId, command: group_pb2.Command, replies: Replies[Reply]) -> None:
        """Open `room` by `command`; `replies` has its first one by then.

        Raises RoomExists while another call is opening it, and what opening it raised. After any other
        exception, a cancellation included, the room is to be given up: a turn may open it yet.
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
        """The room is over, whoever opened it. Whether it is here once a turn has taken this. Raises what
        `Mailbox.ask` does."""
        await self._mailbox.ask(group_pb2.Command(cancel=request))
        return RoomId(request.room) in self._here

    def give_up(self, room: RoomId) -> None:
        """Nobody hears the room any more: it ends."""
        cause = Cause(Reason.BOOTSTRAP_LOST, "the caller ended the room's stream")
        cancel = inference_pb2.CancelRequest(room=room, cause=cause_to_wire(cause))
        self._mailbox.put(group_pb2.Command(cancel=cancel))

    @asynccontextmanager
    async def calling(
        self, room: RoomId, command: group_pb2.Command, replies_max: int
    ) -> AsyncIterator[asyncio.Queue[Reply]]:
        """Open `room` by `command`; the queue holds its first reply by then. `replies_max`: more than its
        stream can ever carry.

        Raises what `open` raises. Left by an exception that is no refusal, a cancellation included, it gives
        the room up.
        """
        replies: asyncio.Queue[Reply] = asyncio.Queue(replies_max)
        try:
            await self.open(room, command, replies)
            yield replies
        except (Refusal, PeerFault):
            raise  # it was not opened
        except BaseException:
            self.give_up(room)
            raise
