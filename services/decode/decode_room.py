"""Record of a room on a decode worker, with fields for the engine, the sender and the caller."""

from collections import abc
from dataclasses import dataclass, field

from baton.decode.drafter import Drafter
from baton.engine_interface import PageSum, Row, Sequence
from baton.handover.receiving_room import ReceivingRoom
from baton.wire.baton.v1 import inference_pb2, rooms_pb2
from baton.wire.conversions import finish_to_wire
from baton.worker.called_room import CalledRoom


def replies_max(request: inference_pb2.InferenceRequest) -> int:
    """Return the most messages in a room's reply stream: one for each token of each choice, `accepted` and
    the outcome."""
    return max(request.max_tokens - len(request.output), 0) * (1 + len(request.further_seeds)) + 2


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a room: a sequence that continues the common prompt."""

    place: int
    """Index of this choice (from 0) in the room's response."""
    sequence: Sequence
    drafter: Drafter | None = None
    """Object that makes draft tokens for the sequence. None before its first step with drafts, or if the
    request wants no drafts."""
    checking: int = 0
    """Number of draft tokens that the last row of this choice verifies."""

    @property
    def forks(self) -> bool:
        """Whether this choice is not choice 0 and has sampled no token yet. Its first row computes all
        positions after the pages that it shares with choice 0."""
        return self.place > 0 and len(self.sequence.output) == len(self.sequence.request.output)


def replayed(room: "DecodeRoom", choice: Choice) -> inference_pb2.Tokens:
    """Return the message with the whole output of a choice so far, for a router that has adopted the room. It
    includes the output of earlier rooms of the request."""
    output = choice.sequence.output
    return inference_pb2.Tokens(
        tokens=[inference_pb2.Token(token=each) for each in output],
        finish=finish_to_wire(room.request.finish_reason(output)),
        cached_tokens=room.cached if room.local else 0,
        local=room.local,
        choice=choice.place,
    )


@dataclass(slots=True, eq=False)
class DecodeRoom(ReceivingRoom, CalledRoom[inference_pb2.StreamRoomReply]):
    REPLY = inference_pb2.StreamRoomReply

    prefill: rooms_pb2.Peer = field(default_factory=rooms_pb2.Peer, init=False)
    prefill_by_ms: int | None = field(default=None, init=False)
    """Time, in milliseconds of this rank's clock, at which the prefill worker is expected to have the first
    token. None if the router gave no estimate."""
    prefill_own_ms: int = field(default=0, init=False)
    """Milliseconds that the prefill worker needs to compute this prompt, without those before it. The router
    estimates it."""
    look_again_ms: int = field(default=0, init=False)
    """Time in milliseconds at which the leader next considers whether this worker computes the room's prompt
    itself."""
    choices: tuple[Choice, ...] = field(init=False)
    landed: PageSum | None = field(default=None, init=False)
    """Checksum of the room's landed pages, as far as it is computed. None before the seal was seen, and
    without `--kv-checksum pages`."""

    def __post_init__(self) -> None:
        ReceivingRoom.__post_init__(self)
        self.choices = tuple(
            Choice(place, Sequence(self.request.choice(place), output))
            for place, output in enumerate(self.outputs)
        )

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences of all choices, which the engine samples."""
        return [choice.sequence for choice in self.choices]

    def prompt_row(self, start: int, stop: int) -> Row:
        """Return the engine row for positions [start, stop) of a prompt that this worker computes itself."""
        last = stop == self.request.prefill_tokens
        return Row(self.choices[0].sequence, start, stop, self.pages[0], last)

    def row(self, choice: Choice, drafts: abc.Sequence[int] = ()) -> Row:
        """Return the engine row of a choice for the next step. `drafts`: draft tokens to verify in it."""
        sequence, start = choice.sequence, self.filled[choice.place]
        return Row(sequence, start, sequence.length, self.pages[choice.place], sample=True, drafts=drafts)
