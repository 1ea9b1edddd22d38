"""Do the pages that landed hold what their sender computed? Asked of every room with `--kv-checksum pages`.

A room whose seal was seen has its pages summed on the engine's thread, and its seal is noted when the sum is
the sender's: pages that do not hold are never voted for, so that no rank admits them (`stale-never-served`).

Sums and steps take turns: neither waits for more than one of the other, whatever the rank beside it does.
"""

from collections.abc import Iterable
from typing import Final

from services.decode.job import Job
from services.engine.interface import SumPart
from services.pages.checksum import told
from services.pages.layout import KvLayout
from services.rooms.errors import Cause, Reason
from services.rooms.phases import Phase
from services.worker.stepper import StepFailed, Stepper

BYTES_AT_A_TIME: Final = 64 * 2**20
"""Of pages summed before the batch has its next step; of all rooms together."""


class LandingCheck:
    """Keeps nothing of a room but in its job: `record` and `landed` are set when its seal was seen."""

    def __init__(self, stepper: Stepper, layout: KvLayout) -> None:
        self._stepper = stepper
        self._tokens_at_a_time = max(BYTES_AT_A_TIME // layout.token_bytes, 1)
        self._summing: list[Job] = []
        self._step_is_due = False

    def start(self, jobs: Iterable[Job], *, batch_waits: bool) -> None:
        """Sum more of what has landed, if the engine is free. `batch_waits`: there is a step to compute."""
        if not self._stepper.free or (batch_waits and self._step_is_due):
            return
        parts: list[SumPart] = []
        left = self._tokens_at_a_time
        for job in jobs:
            if left == 0:
                break
            if job.landed is None or job.record is None or not _undecided(job):
                continue
            stop = min(job.landed.stop + left, job.record.prompt_tokens)
            left -= stop - job.landed.stop
            parts.append(SumPart(job.landed, job.choices[0].pages, stop))
            self._summing.append(job)
            job.receiver.busy = True
        if parts:
            self._stepper.start_sum(parts)

    def stepped(self) -> None:
        """A step was started."""
        self._step_is_due = False

    def take(self) -> list[tuple[Job, Cause | None]]:
        """The rooms whose sums are complete since the last call; with a cause those that do not hold."""
        failure: Cause | None = None
        try:
            if not self._stepper.take_sum():
                return []
        except StepFailed as error:
            failure = Cause(Reason.ENGINE_FAILED, f"decode: {error}")
        self._step_is_due = True
        summed, self._summing = self._summing, []
        for job in summed:
            job.receiver.busy = False
        ended = [job for job in summed if _undecided(job) and (failure is not None or _complete(job))]
        return [(job, failure or _difference(job)) for job in ended]


def _undecided(job: Job) -> bool:
    room = job.receiver
    return room.phase is Phase.TRANSFERRING and not room.sealed and room.cause is None


def _complete(job: Job) -> bool:
    return job.landed is not None and job.record is not None and job.landed.stop == job.record.prompt_tokens


def _difference(job: Job) -> Cause | None:
    if job.landed is None or job.record is None:
        raise AssertionError(f"room {job.receiver.id} was summed without its record")
    if job.record.pages_checksum == told(job.landed.total):
        return None
    pages, tokens = job.record.pages, job.record.prompt_tokens
    text = f"decode: what landed in {pages} pages of {tokens} tokens is not what the prefill worker computed"
    return Cause(Reason.PAGES_CORRUPT, text)
