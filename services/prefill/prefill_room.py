"""What does a prefill worker keep of a room, beside what its hand-over needs?"""

from collections import abc
from dataclasses import dataclass, field
from typing import Final

from baton.engine_interface import PromptScores, Row, Sequence
from baton.handover.sending_side import SendingRoom
from baton.pages.kv_checksum import nonzero_sum
from baton.pages.layout import GroupHead
from baton.prefill.overlap import Overlap
from baton.prefill.room_transfer import RoomTransfer
from baton.rooms.phases import Phase
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import SCORE_MESSAGES_MAX, scores_to_wire
from baton.worker.called_room import CalledRoom

REPLIES_MAX: Final = 4 + SCORE_MESSAGES_MAX
"""A room's whole stream: accepted, its prompt's scores, first token, outcome."""


@dataclass(slots=True, eq=False)
class PrefillRoom(SendingRoom, CalledRoom[inference_pb2.RunRoomReply]):
    REPLY = inference_pb2.RunRoomReply

    sequence: Sequence = field(init=False)
    push: RoomTransfer = field(init=False)
    """Once it has begun."""
    overlap: Overlap = field(default_factory=Overlap, init=False)
    reported_tokens: int = field(default=0, init=False)
    """Leading tokens of which the timeline says that they are computed."""

    def __post_init__(self) -> None:
        self.sequence = Sequence(self.request, list(self.request.output))
        if self.request.prompt_logprobs is not None:
            self.sequence.scores = PromptScores()

    @property
    def sequences(self) -> list[Sequence]:
        """What it draws."""
        return [self.sequence]

    def pages_checksum(self, heads: abc.Sequence[GroupHead]) -> int:
        """Of what was computed for a rank of the receiver that holds `heads`, as its record says it."""
        summed = self.sequence.page_sum
        return 0 if summed is None else nonzero_sum(summed.of(heads))

    def prompt_row(self, start: int, stop: int) -> Row:
        return Row(self.sequence, start, stop, self.pages, stop == self.request.prefill_tokens)

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

    def reply_scores(self) -> None:
        """All of the prompt's, in order."""
        if self.replies is not None and self.sequence.scores is not None:
            for scores in scores_to_wire(self.sequence.scores.told):
                self.reply(inference_pb2.RunRoomReply(scores=scores))
