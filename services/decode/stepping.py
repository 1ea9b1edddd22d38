"""What does a step compute for each choice that goes on, and what comes of it?"""

from collections.abc import Sequence

from services.decode.batch import ChoiceStep, next_batch
from services.decode.metrics import DecodeMetrics
from services.decode.room import Choice, DecodeRoom
from services.engine.interface import Undrawn
from services.handover.receiving import Receiving
from services.rooms.request import Token
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import finish_to_wire, token_to_wire
from services.worker.parts import RankParts
from services.worker.stepping import Stepping


class DecodeStepping(Stepping[ChoiceStep]):
    def __init__(
        self, receiving: Receiving[DecodeRoom], parts: RankParts, metrics: DecodeMetrics, max_running: int
    ) -> None:
        """`max_running`: most sequences that a step continues."""
        super().__init__(receiving, parts, metrics)
        self._receiving = receiving
        self._metrics = metrics
        self._max_running = max_running

    def join(self, room: DecodeRoom) -> None:
        """The room was admitted. Choice 0's first token came in the record; the others draw theirs."""
        if room.record is None:
            raise AssertionError(f"room {room.id} was admitted without its record")
        room.begin()
        if 0 in room.ends.going_on:
            record = room.record
            first = Token(record.first_token, record.first_logprob, record.alternatives)
            self._emit(room, room.choices[0], first)

    def start(self) -> tuple[bool, bool]:
        """Whether there is a next step, which is started, and whether rooms are retracted for it. Only while
        `free`."""
        step = next_batch(self._receiving.roster, self._max_running)
        rows = [choice.row(room.pages[choice.place]) for room, choice in step]
        parts = zip(step, rows, strict=True)
        wants = [
            (room, choice.place, row.stop)
            for (room, choice), row in parts
            if row.stop > room.covered[choice.place]
        ]
        space = self._receiving.space_for(wants)
        if wants:
            step = [part for part in step if part.room.runs and part.has_pages]
            rows = [choice.row(room.pages[choice.place]) for room, choice in step]
        self._metrics.grew(space.given, [room.kv_tokens for room in space.retracted])
        return self._start(step, rows), bool(space.retracted)

    def observe(self) -> None:
        """All that follows from a step's end is done in this turn: the next one is not for it."""
        ended = self._take()
        if ended is None:
            return
        step, taken = ended
        count = sum(len(tokens) for tokens in taken if not isinstance(tokens, Undrawn))
        self._metrics.decoded(count)
        self.tokens += count
        for part, tokens in zip(step, taken, strict=True):
            room, choice = part
            if choice.place not in room.ends.going_on:
                continue  # its reader had enough meanwhile, and the others do not end by it
            if isinstance(tokens, Undrawn):
                self._fail(part, tokens)
            elif not room.stopping:
                self._append(room, choice, tokens)

    def _append(self, room: DecodeRoom, choice: Choice, tokens: Sequence[Token]) -> None:
        """What comes behind the answer's end is dropped."""
        for token in tokens:
            choice.computed = choice.sequence.length
            choice.sequence.output.append(token.id)
            if not self._emit(room, choice, token):
                break

    def _emit(self, room: DecodeRoom, choice: Choice, token: Token) -> bool:
        """Send the token that was just appended to the choice's output. Whether more may follow."""
        finish = self._receiving.drawn(room, choice.place)
        tokens = inference_pb2.Tokens(
            first=len(choice.sequence.output) - 1,
            tokens=[token_to_wire(token)],
            finish=finish_to_wire(finish),
            choice=choice.place,
        )
        room.reply(inference_pb2.StreamRoomReply(tokens=tokens))
        return finish is None
