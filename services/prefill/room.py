"""What does a prefill worker keep of a room, beside what its hand-over needs?"""

from collections import abc
from dataclasses import dataclass, field

from services.engine.interface import PromptScores, Sequence
from services.handover.sending import SendingRoom
from services.pages.checksum import told
from services.prefill.overlap import Overlap
from services.prefill.push import Push
from services.rooms.errors import Cause
from services.rooms.phases import Phase, Vote
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import SCORE_MESSAGES_MAX, outcome_to_wire, scores_to_wire
from services.worker.callers import Replies

REPLIES_MAX = 4 + SCORE_MESSAGES_MAX
"""A room's whole stream: accepted, its prompt's scores, first token, outcome."""


@dataclass(slots=True, eq=False)
class PrefillRoom(SendingRoom):
    replies: Replies[inference_pb2.RunRoomReply] | None = field(default=None, init=False)
    """Where its caller hears of it, on the leader."""
    sequence: Sequence = field(init=False)
    push: Push = field(init=False)
    """Once it has begun."""
    overlap: Overlap = field(default_factory=Overlap, init=False)
    told: int = field(default=0, init=False)
    """Leading tokens of which the timeline says that they are computed."""
    voted: tuple[Phase, Vote] | None = field(default=None, init=False)
    """This rank's last vote that was told, of those that the other ranks did not share at once."""
    concluded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.sequence = Sequence(self.request, list(self.request.output))
        if self.request.prompt_logprobs is not None:
            self.sequence.scores = PromptScores()

    def pages_checksum(self, kv_heads: abc.Sequence[int]) -> int:
        """Of what was computed for a rank of the receiver that holds `kv_heads`, as its record says it."""
        summed = self.sequence.page_sum
        return 0 if summed is None else told(summed.of(kv_heads))

    @property
    def scored(self) -> int:
        """How many of the prompt's tokens were scored."""
        return 0 if self.sequence.scores is None else len(self.sequence.scores.told)

    @property
    def under_way(self) -> bool:
        """Something is to be sent, or is being written."""
        return self.begun and self.push.under_way

    @property
    def unproven(self) -> bool:
        """It failed, and nothing says yet that what was posted for it has ended."""
        return self.phase is Phase.FAILED and self.proof is None and self.under_way

    def reply(self, reply: inference_pb2.RunRoomReply) -> None:
        if self.replies is not None:
            self.replies.put_nowait(reply)

    def tell_scores(self) -> None:
        """All of the prompt's, in order."""
        if self.replies is not None and self.sequence.scores is not None:
            for scores in scores_to_wire(self.sequence.scores.told):
                self.reply(inference_pb2.RunRoomReply(scores=scores))

    def conclude(self, cause: Cause | None) -> None:
        """The last that is said of the room. Once."""
        if not self.concluded:
            self.concluded = True
            self.reply(inference_pb2.RunRoomReply(outcome=outcome_to_wire(cause)))
