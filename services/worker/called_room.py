"""Fields and methods of a room's record for its caller and its timeline, on prefill and decode workers
alike."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from baton.rooms.errors import Cause
from baton.rooms.phases import Phase, Vote
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import outcome_to_wire
from baton.worker.callers import Replies

Reply = TypeVar("Reply", inference_pb2.RunRoomReply, inference_pb2.StreamRoomReply)


@dataclass(eq=False)
class CalledRoom(Generic[Reply]):
    """Mixin for the record of a room: the queue of replies to the room's caller, and the methods that fill
    it."""

    __slots__ = ()  # they are in the record

    REPLY: ClassVar[type[Any]]
    """Protobuf message type of the replies."""

    replies: Replies[Reply] | None = field(default=None, init=False)
    """Queue of replies to the room's caller. None on other ranks than the leader, without a caller, and after
    the outcome."""
    voted: tuple[Phase, Vote] | None = field(default=None, init=False)
    """Last vote of this rank that was reported to the timeline because other ranks voted differently, with
    its phase."""

    def reply(self, reply: Reply) -> None:
        if self.replies is not None:
            self.replies.put_nowait(reply)

    def conclude(self, cause: Cause | None) -> None:
        """Send the caller the outcome, which is the room's last reply. `cause`: cause of an early end, or
        None."""
        self.reply(self.REPLY(outcome=outcome_to_wire(cause)))
        self.replies = None  # type: ignore[misc]
