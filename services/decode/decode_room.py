"""Record of a room on a decode worker, with the fields of its driver."""

from collections import abc
from dataclasses import dataclass, field

from baton.decode.drafter import Drafter
from baton.engine_interface import PageSum, Row, Sequence
from baton.handover.receiving_room import ReceivingRoom
from baton.wire.baton.v1 import inference_pb2, rooms_pb2
from baton.worker.called_room import CalledRoom


def replies_max(request: inference_pb2.InferenceRequest) -> int:
    """Return the most messages of a room's stream: one for each token of each choice, `accepted` and the
    outcome."""
    return max(request.max_tokens - len(request.output), 0) * (1 + len(request.further_seeds)) + 2


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a room: a sequence that continues the common prompt."""

    place: int
    """Index among the room's choices."""
    sequence: Sequence
    drafter: Drafter | None = None
    """Drafter of the sequence. None until drafts are possible."""
    checking: int = 0
    """Number of drafts in its last row."""

    @property
    def forks(self) -> bool:
        """Whether no token was sampled for it here, so that its next row computes what its own pages lack."""
        return self.place > 0 and len(self.sequence.output) == len(self.sequence.request.output)


@dataclass(slots=True, eq=False)
class DecodeRoom(ReceivingRoom, CalledRoom[inference_pb2.StreamRoomReply]):
    REPLY = inference_pb2.StreamRoomReply

    prefill: rooms_pb2.Peer = field(default_factory=rooms_pb2.Peer, init=False)
    prefill_by_ms: int | None = field(default=None, init=False)
    """Time in milliseconds of this rank's clock at which prefill is expected to have the first token. None
    if the router gave no estimate."""
    prefill_own_ms: int = field(default=0, init=False)
    """Milliseconds that prefill needs for this prompt alone."""
    look_again_ms: int = field(default=0, init=False)
    """Time in milliseconds at which the leader next considers to compute the prompt here."""
    choices: tuple[Choice, ...] = field(init=False)
    landed: PageSum | None = field(default=None, init=False)
    """Sum of the landed pages, set once the seal was seen. Used with `--kv-checksum pages`."""

    def __post_init__(self) -> None:
        ReceivingRoom.__post_init__(self)
        self.choices = tuple(
            Choice(place, Sequence(self.request.choice(place), output))
            for place, output in enumerate(self.outputs)
        )

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that are sampled."""
        return [choice.sequence for choice in self.choices]

    def prompt_row(self, start: int, stop: int) -> Row:
        """Return the row of a chunk of a prompt that is computed here."""
        last = stop == self.request.prefill_tokens
        return Row(self.choices[0].sequence, start, stop, self.pages[0], last)

    def row(self, choice: Choice, drafts: abc.Sequence[int] = ()) -> Row:
        """Return the next row of a choice."""
        sequence, start = choice.sequence, self.filled[choice.place]
        return Row(sequence, start, sequence.length, self.pages[choice.place], sample=True, drafts=drafts)
