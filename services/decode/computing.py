"""What does each step of the engine compute, and what becomes of it?"""

from services.decode.batch import ChoiceStep, next_batch
from services.decode.metrics import DecodeMetrics
from services.decode.room import Choice, DecodeRoom
from services.engine.interface import NotHeld, Undrawn
from services.handover.receiving import Receiving
from services.rooms.errors import Reason
from services.rooms.request import Token
from services.runtime.clock import Clock
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import finish_to_wire, token_to_wire
from services.worker.stepper import StepFailed, Stepper


class Decoding:
    """One step at a time. Its rooms are busy until it has ended, whatever becomes of them."""

    def __init__(
        self,
        receiving: Receiving[DecodeRoom],
        stepper: Stepper,
        max_running: int,
        *,
        metrics: DecodeMetrics,
        clock: Clock,
    ) -> None:
        """`max_running`: most sequences that a step continues."""
        self.tokens = 0
        """Drawn, since start."""
        self._receiving = receiving
        self._stepper = stepper
        self._max_running = max_running
        self._metrics = metrics
        self._clock = clock
        self._step: list[ChoiceStep] = []
        self._step_us = 0
        """When it was started."""

    def __len__(self) -> int:
        """Sequences that the running step continues."""
        return len(self._step)

    @property
    def free(self) -> bool:
        return self._stepper.free

    def join(self, room: DecodeRoom) -> None:
        """The room was admitted. Choice 0's first token came in the record; the others draw theirs."""
        if room.record is None:
            raise AssertionError(f"room {room.id} was admitted without its record")
        room.begin()
        if 0 in room.ends.going_on:
            record = room.record
            first = Token(record.first_token, record.first_logprob, record.alternatives)
            self._emit(room, room.choices[0], first)

    def start(self) -> bool:
        """Whether there is a next step, which is started. Only while `free`."""
        batch = next_batch(self._receiving.roster, self._max_running)
        if not batch:
            return False
        for room, _ in batch:
            room.busy = True
        self._step, self._step_us = batch, self._clock.host_us()
        self._stepper.start([choice.row for _, choice in batch])
        return True

    def see(self) -> None:
        """All that follows from a step's end is done in this turn: the next one is not for it."""
        try:
            tokens = self._stepper.take()
        except StepFailed as error:
            for room, _ in self._step:
                self._fail(room, error)
            self._step = []
            return
        if tokens is None:
            return
        for (room, choice), token in zip(self._step, tokens, strict=True):
            room.busy = False
            if choice.place not in room.ends.going_on:
                continue  # its reader had enough meanwhile, and the others do not end by it
            if isinstance(token, Undrawn):
                self._fail(room, token)
            elif token is not None and not room.stopping:
                choice.computed = choice.sequence.length
                choice.sequence.output.append(token.id)
                self._emit(room, choice, token)
        self._metrics.decoded(len(tokens))
        self.tokens += len(tokens)
        self._metrics.worker.stepped((self._clock.host_us() - self._step_us) / 1e6)
        self._step = []

    def _emit(self, room: DecodeRoom, choice: Choice, token: Token) -> None:
        """Send the token that was just appended to the choice's output."""
        finish = self._receiving.drawn(room, choice.place)
        tokens = inference_pb2.Tokens(
            first=len(choice.sequence.output) - 1,
            tokens=[token_to_wire(token)],
            finish=finish_to_wire(finish),
            choice=choice.place,
        )
        room.reply(inference_pb2.StreamRoomReply(tokens=tokens))

    def _fail(self, room: DecodeRoom, why: Exception) -> None:
        room.busy = False
        reason = Reason.GRAMMAR_FAILED if isinstance(why, NotHeld) else Reason.ENGINE_FAILED
        self._receiving.fail(room, reason, f"decode: {why}")
