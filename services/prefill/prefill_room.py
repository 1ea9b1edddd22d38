"""Record of a room on a prefill worker, with fields for the engine, the transfer and the caller."""

from collections import abc
from dataclasses import dataclass, field, replace
from typing import Final

from baton.engine_interface import PromptScores, Row, Sequence
from baton.handover.sending_room import SendingRoom
from baton.pages.kv_checksum import nonzero_sum
from baton.pages.layout import GroupHead
from baton.prefill.overlap import Overlap
from baton.prefill.room_transfer import RoomTransfer
from baton.rooms.phases import Phase
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import SCORE_MESSAGES_MAX, scores_to_wire
from baton.worker.called_room import CalledRoom

REPLIES_MAX: Final = 4 + SCORE_MESSAGES_MAX
"""Most messages in a room's reply stream: accepted, scores of the prompt, first token, outcome."""


@dataclass(slots=True, eq=False)
class PrefillRoom(SendingRoom, CalledRoom[inference_pb2.RunRoomReply]):
    REPLY = inference_pb2.RunRoomReply

    sequence: Sequence = field(init=False)
    push: RoomTransfer = field(init=False)
    """Transfer of the room's pages, record and seal to its receiver. Set when the room has its pages."""
    overlap: Overlap = field(default_factory=Overlap, init=False)
    reported_tokens: int = field(default=0, init=False)
    """Number of leading tokens that were computed when the timeline last reported it."""

    def __post_init__(self) -> None:
        self.sequence = Sequence(self.request, list(self.request.output))
        if self.request.prompt_logprobs is not None:
            self.sequence.scores = PromptScores()

    @property
    def sequences(self) -> list[Sequence]:
        """Engine sequences of the room: always a single one."""
        return [self.sequence]

    def pages_checksum(self, heads: abc.Sequence[GroupHead]) -> int:
        """Return the checksum of the room's pages for one rank of the receiver, as the metadata record
        contains it. `heads`: KV heads of that rank. 0 if no checksum is computed."""
        summed = self.sequence.page_sum
        return 0 if summed is None else nonzero_sum(summed.of(heads))

    def prompt_row(self, start: int, stop: int) -> Row:
        restored = self.restored if start == self.cached else ()
        stored = (self.stored or {}).get(stop, ())
        row = Row(self.sequence, start, stop, self.pages, stop == self.request.prefill_tokens)
        return replace(row, state_from=restored, state_to=stored) if restored or stored else row

    @property
    def scored(self) -> int:
        """Number of prompt tokens whose log-probabilities have been computed so far."""
        return 0 if self.sequence.scores is None else len(self.sequence.scores.values)

    @property
    def under_way(self) -> bool:
        """Whether writes of the room to its receiver are under way or still to be started."""
        return self.begun and self.push.under_way

    @property
    def unproven(self) -> bool:
        """Whether the room has failed while writes to its receiver may still be under way."""
        return self.phase is Phase.FAILED and self.proof is None and self.under_way

    def reply_scores(self) -> None:
        """Send the caller the scores (log-probabilities) of all prompt tokens, in order."""
        if self.replies is not None and self.sequence.scores is not None:
            for scores in scores_to_wire(self.sequence.scores.values):
                self.reply(inference_pb2.RunRoomReply(scores=scores))
