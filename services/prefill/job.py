"""What does the prefill worker keep for a room, beside the room's own record?"""

import asyncio
from collections import abc
from dataclasses import dataclass, field
from typing import Final

from services.engine.interface import PromptScores, Sequence
from services.ids import PageId
from services.pages.checksum import told
from services.pages.record import ALTERNATIVES_MAX, MetadataRecord
from services.prefill.overlap import Overlap
from services.prefill.push import Push
from services.prefill.ways import Way
from services.rooms.errors import Cause
from services.rooms.phases import Phase, Vote
from services.rooms.request import Request, Token
from services.rooms.sender import Sender
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import SCORE_MESSAGES_MAX, outcome_to_wire, scores_to_wire
from services.worker.callers import Replies

REPLIES_MAX: Final = 4 + SCORE_MESSAGES_MAX
"""A room's whole stream: accepted, its prompt's scores, first token, outcome."""


@dataclass(slots=True, eq=False)
class Job:
    sender: Sender
    request: Request
    decode_name: str
    replies: Replies[inference_pb2.RunRoomReply] | None = None
    """Where its caller hears of it, on the leader."""
    sequence: Sequence = field(init=False)
    way: Way | None = None
    """Where its grant leads."""
    pages: tuple[PageId, ...] = ()
    computed: int = 0
    """Leading tokens whose KV is in the pages."""
    told: int = 0
    """Leading tokens of which the timeline says that they are computed."""
    cached: int = 0
    """Leading tokens whose KV was in the pages when they were taken."""
    first: Token | None = None
    push: Push | None = None
    overlap: Overlap = field(default_factory=Overlap)
    voted: tuple[Phase, Vote] | None = None
    """This rank's last vote that was told, of those that the other ranks did not share at once."""
    outcome_told: bool = False
    closers: set[asyncio.Future[None]] = field(default_factory=set)
    """Who waits for the proof that this room is quiet."""

    def __post_init__(self) -> None:
        self.sequence = Sequence(self.request, list(self.request.output))
        if self.request.prompt_logprobs is not None:
            self.sequence.scores = PromptScores()

    @property
    def tokens(self) -> tuple[int, ...]:
        """All whose KV is handed over."""
        return self.request.prompt + self.request.output

    @property
    def record(self) -> MetadataRecord:
        """What the receiver is to know beside the pages, once all is computed."""
        sender, token = self.sender, self.first
        if token is None or sender.grant is None:
            raise AssertionError(f"room {sender.id} has a record before it was computed")
        return MetadataRecord(
            room=sender.id,
            generation=sender.grant.generation,
            prompt_tokens=self.request.prefill_tokens,
            cached_tokens=self.cached,
            pages=len(sender.grant.pages),
            first_token=token.id,
            first_logprob=token.logprob,
            # What it cannot hold, the bootstrap hears from here alone (`record-fits`).
            alternatives=token.top[:ALTERNATIVES_MAX],
        )

    def pages_checksum(self, kv_heads: abc.Sequence[int]) -> int:
        """Of what was computed for a rank of the receiver that holds `kv_heads`, as its record says it."""
        summed = self.sequence.page_sum
        return 0 if summed is None else told(summed.of(kv_heads))

    @property
    def complete(self) -> bool:
        """All that is known was computed."""
        return self.computed == self.request.prefill_tokens

    @property
    def scored(self) -> int:
        """How many of the prompt's tokens were scored."""
        return 0 if self.sequence.scores is None else len(self.sequence.scores.told)

    @property
    def to_be_scored(self) -> bool:
        """What is computed next scores tokens of its prompt."""
        return self.computed < self.request.scores

    @property
    def reusable(self) -> tuple[int, ...]:
        """Its first tokens, to be begun behind where their KV is there already. The last token is computed in
        any case: what follows it is drawn from that. Of a prompt that is scored all are
        (`scored-is-computed`)."""
        return self.tokens[:-1] if self.sequence.scores is None else ()

    @property
    def computable(self) -> bool:
        return self.sender.phase is Phase.TRANSFERRING and not self.complete

    @property
    def under_way(self) -> bool:
        """Something is to be sent, or is being written, of a room that has not failed."""
        return self.push is not None and self.push.under_way and self.sender.phase is not Phase.FAILED

    @property
    def unproven(self) -> bool:
        """It failed, and nothing says yet that what was posted for it has ended."""
        failed = self.sender.phase is Phase.FAILED and self.sender.proof is None
        return failed and self.push is not None and self.push.under_way

    def reply(self, reply: inference_pb2.RunRoomReply) -> None:
        if self.replies is not None:
            self.replies.put_nowait(reply)

    def tell_scores(self) -> None:
        """All of the prompt's, in order."""
        if self.replies is not None and self.sequence.scores is not None:
            for scores in scores_to_wire(self.sequence.scores.told):
                self.reply(inference_pb2.RunRoomReply(scores=scores))

    def tell_outcome(self, cause: Cause | None) -> None:
        """The last that is said of the room."""
        self.outcome_told = True
        self.reply(inference_pb2.RunRoomReply(outcome=outcome_to_wire(cause)))
