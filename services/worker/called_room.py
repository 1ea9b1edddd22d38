"""What does a worker keep of a room, whatever its role, beside what the hand-over does?"""

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
    """Added to a side's record."""

    __slots__ = ()  # the record has them

    REPLY: ClassVar[type[Any]]
    """The message by which its caller hears of it."""

    replies: Replies[Reply] | None = field(default=None, init=False)
    """Where its caller hears of it, on the leader, until it has heard how the room ended."""
    voted: tuple[Phase, Vote] | None = field(default=None, init=False)
    """This rank's last vote that was told, of those that the other ranks did not share at once."""

    def reply(self, reply: Reply) -> None:
        if self.replies is not None:
            self.replies.put_nowait(reply)

    def conclude(self, cause: Cause | None) -> None:
        """The last that its caller hears."""
        self.reply(self.REPLY(outcome=outcome_to_wire(cause)))
        self.replies = None  # type: ignore[misc]
