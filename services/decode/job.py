"""What does the decode worker keep for a room, beside the room's own record?"""

from dataclasses import dataclass, field

from services.engine.engine import PageSum, Sequence
from services.pages.record import MetadataRecord
from services.rooms.errors import Cause
from services.rooms.phases import Phase, Vote
from services.rooms.receiver import Receiver
from services.rooms.request import Request
from services.wire.baton.v1 import inference_pb2, rooms_pb2
from services.wire.callers import Replies
from services.wire.conversions import outcome_to_wire


def replies_max(request: inference_pb2.InferenceRequest) -> int:
    """Most messages that a room's stream can ever carry: one a token, accepted, outcome."""
    return max(request.max_tokens - len(request.output), 0) + 2


@dataclass(slots=True, eq=False)
class Job:
    receiver: Receiver
    request: Request
    prefill: rooms_pb2.Peer
    replies: Replies[inference_pb2.StreamRoomReply] | None = None
    """Where its caller hears of it, on the leader."""
    sequence: Sequence = field(init=False)
    pages: tuple[int, ...] = ()
    record: MetadataRecord | None = None
    """As it was when its seal was seen: what a peer writes to the slot later is not looked at."""
    near_until_s: float | None = None
    """Until when its seal is looked for without a pause, once its record is there."""
    landed: PageSum | None = None
    """With `--kv-checksum pages`: of what landed, once the seal was seen."""
    voted: tuple[Phase, Vote] | None = None
    """This rank's last vote that was told, of those that the other ranks did not share at once."""
    finished: bool = False
    """The sequence has ended by itself."""
    outcome_told: bool = False

    def __post_init__(self) -> None:
        self.sequence = Sequence(self.request, list(self.request.output))

    def reply(self, reply: inference_pb2.StreamRoomReply) -> None:
        if self.replies is not None:
            self.replies.put_nowait(reply)

    def tell_outcome(self, cause: Cause | None) -> None:
        """The last that is said of the room."""
        self.outcome_told = True
        self.reply(inference_pb2.StreamRoomReply(outcome=outcome_to_wire(cause)))

    @property
    def given(self) -> tuple[int, ...]:
        """The tokens whose KV the prefill worker answers for."""
        return self.request.prompt + self.request.output

    @property
    def computed(self) -> tuple[int, ...]:
        """All tokens whose KV is in the pages: the last one drawn was not computed."""
        return (*self.request.prompt, *self.sequence.output[:-1])

    @property
    def position(self) -> int:
        """Of the last token drawn: its KV is what the next step computes."""
        return len(self.request.prompt) + len(self.sequence.output) - 1
