"""What does each step of the engine compute, and what becomes of it?"""

from collections.abc import Iterable

from services.decode.answers import Answers
from services.decode.batch import Part, next_batch
from services.decode.job import Job
from services.decode.metrics import DecodeMetrics
from services.engine.interface import NotHeld, Undrawn
from services.rooms.errors import Cause, Reason
from services.rooms.evidence import Failed
from services.runtime.clock import Clock
from services.worker.stepper import StepFailed, Stepper


class Computing:
    """One step at a time. Its rooms are busy until it has ended, whatever becomes of them."""

    def __init__(
        self, stepper: Stepper, max_running: int, *, answers: Answers, metrics: DecodeMetrics, clock: Clock
    ) -> None:
        """`max_running`: most sequences that a step continues."""
        self.tokens = 0
        """Drawn, since start."""
        self._stepper = stepper
        self._max_running = max_running
        self._answers = answers
        self._metrics = metrics
        self._clock = clock
        self._step: list[Part] = []
        self._step_us = 0
        """When it was started."""

    def __len__(self) -> int:
        """Sequences that the running step continues."""
        return len(self._step)

    @property
    def free(self) -> bool:
        return self._stepper.free

    def start(self, jobs: Iterable[Job]) -> bool:
        """Whether there is a next step, which is started. Only while `free`. `jobs`: all that there are,
        oldest first."""
        batch = next_batch(jobs, self._max_running)
        if not batch:
            return False
        for job, _ in batch:
            job.receiver.busy = True
        self._step, self._step_us = batch, self._clock.host_us()
        self._stepper.start([choice.row for _, choice in batch])
        return True

    def see(self) -> None:
        """All that follows from a step's end is done in this turn: the next one is not for it."""
        try:
            tokens = self._stepper.take()
        except StepFailed as error:
            for job, _ in self._step:
                self._fail(job, error)
            self._step = []
            return
        if tokens is None:
            return
        for (job, choice), token in zip(self._step, tokens, strict=True):
            job.receiver.busy = False
            if choice.place not in job.ends.going_on:
                continue  # its reader had enough meanwhile, and the others do not end by it
            if isinstance(token, Undrawn):
                self._fail(job, token)
            elif token is not None and not job.receiver.stopping:
                choice.computed = choice.sequence.length
                choice.sequence.output.append(token.id)
                self._answers.emit(job, choice, token)
        self._metrics.decoded(len(tokens))
        self.tokens += len(tokens)
        self._metrics.worker.stepped((self._clock.host_us() - self._step_us) / 1e6)
        self._step = []

    def _fail(self, job: Job, why: Exception) -> None:
        job.receiver.busy = False
        reason = Reason.GRAMMAR_FAILED if isinstance(why, NotHeld) else Reason.ENGINE_FAILED
        job.receiver.note(Failed(Cause(reason, f"decode: {why}")))
