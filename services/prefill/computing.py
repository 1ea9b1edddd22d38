"""What does each step of the engine compute, and what becomes of it?"""

from typing import Final

from services.engine.interface import NotHeld, Row, Undrawn
from services.handover.sending import Sending
from services.prefill.batch import PromptPart, next_parts
from services.prefill.metrics import PrefillMetrics
from services.prefill.room import PrefillRoom
from services.rooms.errors import Reason
from services.rooms.plurals import counted
from services.rooms.timeline import Moment
from services.runtime.clock import Clock
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import finish_to_wire, token_to_wire
from services.worker.pages import STEP_MS
from services.worker.reporter import Reporter
from services.worker.stepper import StepFailed, Stepper

CHUNK_LINES_MAX: Final = 64
"""Of one room's timeline, but for the steps in which it shared its budget with others."""


class Prefilling:
    """One step at a time. Its rooms are busy until it has ended, whatever becomes of them."""

    def __init__(
        self,
        sending: Sending[PrefillRoom],
        stepper: Stepper,
        chunk_tokens: int,
        scored_tokens: int,
        *,
        reporter: Reporter,
        metrics: PrefillMetrics,
        clock: Clock,
    ) -> None:
        """`chunk_tokens`: most that a step computes. `scored_tokens`: most of them of prompts that are
        scored."""
        self.tokens = 0
        """Computed, since start."""
        self._sending = sending
        self._stepper = stepper
        self._chunk_tokens = chunk_tokens
        self._scored_tokens = scored_tokens
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock
        self._step: list[PromptPart] = []
        self._step_us = 0
        """When it was started."""

    def __len__(self) -> int:
        """Rooms that the running step computes."""
        return len(self._step)

    @property
    def free(self) -> bool:
        return self._stepper.free

    def start(self) -> None:
        """The next step, if there is one. Only while `free`."""
        computable = (room for room in self._sending.roster if room.computable)
        parts = next_parts(computable, self._chunk_tokens, self._scored_tokens)
        if not parts:
            return
        rows = [Row(part.room.sequence, part.start, part.stop, part.room.pages, part.last) for part in parts]
        for part in parts:
            part.room.busy = True
        self._step, self._step_us = parts, self._clock.host_us()
        self._stepper.start(rows)

    def see(self) -> bool:
        """Whether a step has ended."""
        try:
            tokens = self._stepper.take()
        except StepFailed as error:
            for part in self._step:
                self._fail(part.room, error)
            self._step = []
            return True
        if tokens is None:
            if self._step and self._clock.host_us() - self._step_us < STEP_MS * 1000:
                self._sending.stepping(self._clock.now_ms())
            return False
        self._metrics.worker.stepped((self._clock.host_us() - self._step_us) / 1e6)
        for part, token in zip(self._step, tokens, strict=True):
            if isinstance(token, Undrawn):
                self._fail(part.room, token)
                continue
            self._metrics.computed(part.stop - part.start, part.scored)
            self.tokens += part.stop - part.start
            if self._sending.computed(part.room, part.stop, token, self._clock.now_ms()):
                self._computed(part.room)
        self._step = []
        self._sending.stepping(self._clock.now_ms())
        return True

    def _fail(self, room: PrefillRoom, why: Exception) -> None:
        room.busy = False
        reason = Reason.GRAMMAR_FAILED if isinstance(why, NotHeld) else Reason.ENGINE_FAILED
        self._sending.fail(room, reason, f"prefill: {why}")

    def _computed(self, room: PrefillRoom) -> None:
        """Tell of a chunk, or of the first token behind the last one."""
        if room.first is None:
            # A long prompt's chunks do not take the place of what comes after them.
            if room.computed - room.told >= room.request.prefill_tokens / CHUNK_LINES_MAX:
                room.told = room.computed
                self._reporter.note(room.id, Moment.CHUNK_COMPUTED, f"{room.computed} tokens so far")
            return
        spent_ms = sum(room.phase_ms.values()) + self._clock.now_ms() - room.entered_ms
        self._metrics.first_token(spent_ms / 1000)
        room.tell_scores()
        finish = finish_to_wire(room.request.finish_reason([*room.request.output, room.first.id]))
        token = token_to_wire(room.first)
        first = inference_pb2.FirstToken(token=token, finish=finish, cached_tokens=room.cached)
        room.reply(inference_pb2.RunRoomReply(first_token=first))
        detail = f"{room.computed - room.cached} tokens computed, {room.cached} cached"
        if room.sequence.scores is not None:
            detail += f", {counted(room.scored, 'token')} of the prompt scored"
        self._reporter.note(room.id, Moment.FIRST_TOKEN, detail)
