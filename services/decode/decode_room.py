"""What does a decode worker keep of a room, beside what the hand-over does?"""

from collections import abc
from dataclasses import dataclass, field

from baton.decode.drafter import Drafter
from baton.engine_interface import PageSum, Row, Sequence
from baton.handover.receiving_room import ReceivingRoom
from baton.wire.baton.v1 import inference_pb2, rooms_pb2
from baton.worker.called_room import CalledRoom


def replies_max(request: inference_pb2.InferenceRequest) -> int:
    """Most messages that a room's stream can ever carry: one a token of each choice, accepted, outcome."""
    return max(request.max_tokens - len(request.output), 0) * (1 + len(request.further_seeds)) + 2


@dataclass(slots=True, eq=False)
class Choice:
    """One of the sequences that go on behind what the room begins with."""

    place: int
    """Among the room's choices, from 0 on."""
    sequence: Sequence
    drafter: Drafter | None = None
    """Once something may be drafted for it."""
    checking: int = 0
    """Drafts in its last row."""

    @property
    def forks(self) -> bool:
        """Nothing was drawn for it here: its next step computes what its own pages do not hold yet."""
        return self.place > 0 and len(self.sequence.output) == len(self.sequence.request.output)


@dataclass(slots=True, eq=False)
class DecodeRoom(ReceivingRoom, CalledRoom[inference_pb2.StreamRoomReply]):
    REPLY = inference_pb2.StreamRoomReply

    prefill: rooms_pb2.Peer = field(default_factory=rooms_pb2.Peer, init=False)
    prefill_by_ms: int | None = field(default=None, init=False)
    """When prefill is expected to have its first token, by this rank's clock; None: nobody said so."""
    prefill_own_ms: int = field(default=0, init=False)
    """For how long prefill would compute this very prompt."""
    look_again_ms: int = field(default=0, init=False)
    """When the leader looks again whether to compute it here."""
    choices: tuple[Choice, ...] = field(init=False)
    landed: PageSum | None = field(default=None, init=False)
    """With `--kv-checksum pages`: of what landed, once the seal was seen."""

    def __post_init__(self) -> None:
        ReceivingRoom.__post_init__(self)
        self.choices = tuple(
            Choice(place, Sequence(self.request.choice(place), output))
            for place, output in enumerate(self.outputs)
        )

    @property
    def sequences(self) -> list[Sequence]:
        """What it draws."""
        return [choice.sequence for choice in self.choices]

    def prompt_row(self, start: int, stop: int) -> Row:
        """Of a local room."""
        last = stop == self.request.prefill_tokens
        return Row(self.choices[0].sequence, start, stop, self.pages[0], last)

    def row(self, choice: Choice, drafts: abc.Sequence[int] = ()) -> Row:
        """What the choice's next step computes."""
        sequence, start = choice.sequence, self.filled[choice.place]
        return Row(sequence, start, sequence.length, self.pages[choice.place], sample=True, drafts=drafts)
