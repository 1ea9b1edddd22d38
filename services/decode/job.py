"""What does the decode worker keep for a room, beside the room's own record?"""

from collections import abc
from dataclasses import dataclass, field

from services.engine.interface import PageSum, Row, Sequence
from services.ids import PageId
from services.pages.record import MetadataRecord
from services.rooms.choice_pages import ChoicePages
from services.rooms.choices import Choices
from services.rooms.errors import Cause
from services.rooms.phases import Phase, Vote
from services.rooms.receiver import Receiver
from services.rooms.request import Request
from services.wire.baton.v1 import inference_pb2, rooms_pb2
from services.wire.conversions import outcome_to_wire
from services.worker.callers import Replies


def replies_max(request: inference_pb2.InferenceRequest) -> int:
    """Most messages that a room's stream can ever carry: one a token of each choice, accepted, outcome."""
    return max(request.max_tokens - len(request.output), 0) * (1 + len(request.further_seeds)) + 2


@dataclass(slots=True, eq=False)
class Choice:
    """One of the sequences that go on behind what the room begins with."""

    place: int
    """Among the room's choices, from 0 on."""
    sequence: Sequence
    pages: tuple[PageId, ...] = ()
    computed: int = 0
    """Leading tokens whose KV is in its pages, once the room is admitted."""

    @property
    def forks(self) -> bool:
        """Nothing was drawn for it here: its next step computes what its own pages do not hold yet."""
        return self.place > 0 and len(self.sequence.output) == len(self.sequence.request.output)

    @property
    def row(self) -> Row:
        """What its next step computes."""
        return Row(self.sequence, self.computed, self.sequence.length, self.pages, sample=True)


@dataclass(slots=True, eq=False)
class Job:
    receiver: Receiver
    request: Request
    prefill: rooms_pb2.Peer
    division: ChoicePages
    """Of its pages, among the choices."""
    replies: Replies[inference_pb2.StreamRoomReply] | None = None
    """Where its caller hears of it, on the leader."""
    choices: tuple[Choice, ...] = field(init=False)
    ends: Choices = field(init=False)
    """Of those."""
    record: MetadataRecord | None = None
    """As it was when its seal was seen: what a peer writes to the slot later is not looked at."""
    near_until_s: float | None = None
    """Until when its seal is looked for without a pause, once its record is there."""
    landed: PageSum | None = None
    """With `--kv-checksum pages`: of what landed, once the seal was seen."""
    voted: tuple[Phase, Vote] | None = None
    """This rank's last vote that was told, of those that the other ranks did not share at once."""
    finished: bool = False
    """Every choice has ended, and the room with them."""
    outcome_told: bool = False

    def __post_init__(self) -> None:
        asked = [self.request.choice(place) for place in range(self.request.choices)]
        self.choices = tuple(
            Choice(place, Sequence(each, list(each.output))) for place, each in enumerate(asked)
        )
        self.ends = Choices(len(asked))

    def lay(self, pages: abc.Sequence[PageId]) -> None:
        """The room's pages are these: give each choice its own."""
        for choice in self.choices:
            choice.pages = self.division.table(pages, choice.place)

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
        """All tokens of choice 0 whose KV is in the pages: the last one drawn was not computed."""
        return (*self.request.prompt, *self.choices[0].sequence.output[:-1])
