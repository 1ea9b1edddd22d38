"""What does each step of the engine compute, and what becomes of it?"""

from collections.abc import Iterable
from typing import Final

from services.engine.interface import NotHeld, Row, Undrawn
from services.prefill.batch import Part, next_parts
from services.prefill.job import Job
from services.prefill.metrics import PrefillMetrics
from services.rooms.errors import Cause, Reason
from services.rooms.evidence import Failed
from services.rooms.phases import Phase
from services.rooms.plurals import counted
from services.rooms.request import Token
from services.rooms.timeline import Moment
from services.runtime.clock import Clock
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import finish_to_wire, token_to_wire
from services.worker.pages import STEP_MS
from services.worker.reporter import Reporter
from services.worker.stepper import StepFailed, Stepper

CHUNK_LINES_MAX: Final = 64
"""Of one room's timeline, but for the steps in which it shared its budget with others."""


class Computing:
    """One step at a time. Its rooms are busy until it has ended, whatever becomes of them."""

    def __init__(
        self,
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
        self._stepper = stepper
        self._chunk_tokens = chunk_tokens
        self._scored_tokens = scored_tokens
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock
        self._step: list[Part] = []
        self._step_us = 0
        """When it was started."""

    def __len__(self) -> int:
        """Rooms that the running step computes."""
        return len(self._step)

    @property
    def free(self) -> bool:
        return self._stepper.free

    def start(self, jobs: Iterable[Job]) -> None:
        """The next step, if there is one. Only while `free`. `jobs`: all that there are, oldest first."""
        computable = (job for job in jobs if job.computable)
        parts = next_parts(computable, self._chunk_tokens, self._scored_tokens)
        if not parts:
            return
        rows = [Row(part.job.sequence, part.start, part.stop, part.job.pages, part.last) for part in parts]
        for part in parts:
            part.job.sender.busy = True
        self._step, self._step_us = parts, self._clock.host_us()
        self._stepper.start(rows)

    def see(self, jobs: Iterable[Job]) -> bool:
        """Whether a step has ended. `jobs`: as for `start`."""
        try:
            tokens = self._stepper.take()
        except StepFailed as error:
            for part in self._step:
                self._fail(part.job, error)
            self._step = []
            return True
        if tokens is None:
            if self._step and self._clock.host_us() - self._step_us < STEP_MS * 1000:
                self._progressed(jobs)
            return False
        self._metrics.worker.stepped((self._clock.host_us() - self._step_us) / 1e6)
        for part, token in zip(self._step, tokens, strict=True):
            if isinstance(token, Undrawn):
                self._fail(part.job, token)
                continue
            part.job.sender.busy = False
            part.job.computed = part.stop
            self._metrics.computed(part.stop - part.start, part.scored)
            self.tokens += part.stop - part.start
            self._computed(part.job, token)
        self._step = []
        self._progressed(jobs)
        return True

    def _progressed(self, jobs: Iterable[Job]) -> None:
        """A step goes on, or has ended: progress of all that it is for, and that wait for the next."""
        now_ms = self._clock.now_ms()
        for job in jobs:
            if job.computable:
                job.sender.progressed(now_ms)

    def _fail(self, job: Job, why: Exception) -> None:
        job.sender.busy = False
        reason = Reason.GRAMMAR_FAILED if isinstance(why, NotHeld) else Reason.ENGINE_FAILED
        job.sender.note(Failed(Cause(reason, f"prefill: {why}")))

    def _computed(self, job: Job, token: Token | None) -> None:
        """A chunk is in the pages: send what is whole, and with the last one the first token."""
        if job.push is None or job.sender.phase is not Phase.TRANSFERRING:
            return
        job.push.ready(job.computed, complete=job.complete)
        job.sender.progressed(self._clock.now_ms())
        if token is None:
            # A long prompt's chunks do not take the place of what comes after them.
            if job.computed - job.told >= job.request.prefill_tokens / CHUNK_LINES_MAX:
                job.told = job.computed
                self._reporter.note(job.sender.id, Moment.CHUNK_COMPUTED, f"{job.computed} tokens so far")
            return
        job.first = token
        if job.sender.elected:
            job.push.tell(job.record, job.pages_checksum)
        spent_ms = sum(job.sender.phase_ms.values()) + self._clock.now_ms() - job.sender.entered_ms
        self._metrics.first_token(spent_ms / 1000)
        job.tell_scores()
        finish = finish_to_wire(job.request.finish_reason([*job.request.output, token.id]))
        first = inference_pb2.FirstToken(token=token_to_wire(token), finish=finish, cached_tokens=job.cached)
        job.reply(inference_pb2.RunRoomReply(first_token=first))
        detail = f"{job.computed - job.cached} tokens computed, {job.cached} cached"
        if job.sequence.scores is not None:
            detail += f", {counted(job.scored, 'token')} of the prompt scored"
        self._reporter.note(job.sender.id, Moment.FIRST_TOKEN, detail)
