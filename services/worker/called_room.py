"""Part of a room's record that prefill and decode workers have in common: replies to its caller, and its
reported votes."""

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
    """Class of the protobuf messages in which the room's replies are sent to its caller."""

    replies: Replies[Reply] | None = field(default=None, init=False)
    """Queue of replies to the room's caller. None on ranks other than the leader, for a room without a
    caller, and after the last reply."""
    voted: tuple[Phase, Vote] | None = field(default=None, init=False)
    """Last vote of this rank about the room that the timeline reports, with the room's phase then. Only votes
    that differ from other ranks' are reported."""

    def reply(self, reply: Reply) -> None:
        if self.replies is not None:
            self.replies.put_nowait(reply)

    def conclude(self, cause: Cause | None) -> None:
        """Send the caller the outcome, which is the room's last reply. `cause`: reason for which the room
        ended early, or None."""
        self.reply(self.REPLY(outcome=outcome_to_wire(cause)))
        self.replies = None  # type: ignore[misc]
