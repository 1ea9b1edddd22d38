"""What becomes known on this rank as a room's pages, its record and its seal are written?"""

from collections.abc import Mapping

from services.engine.interface import PageSum
from services.ids import RoomId
from services.pages.checksum import KvChecksum
from services.pages.slots import Slot, SlotPool
from services.prefill.job import Job
from services.prefill.metrics import PrefillMetrics
from services.prefill.push import Push, Quota, Stage
from services.rooms.errors import Cause, Reason
from services.rooms.evidence import Failed, Fenced, Proof, Sealed, Written
from services.rooms.phases import GATED, Phase
from services.rooms.plurals import counted
from services.rooms.timeline import Moment
from services.runtime.clock import Clock
from services.transfer.interface import Transfer
from services.worker.reporter import Reporter


class Sending:
    """Turns what becomes of each room's push into evidence, counts and lines of its timeline."""

    def __init__(
        self,
        transfer: Transfer,
        slots: SlotPool,
        page_tokens: int,
        window_bytes: int,
        checksum: KvChecksum,
        *,
        reporter: Reporter,
        metrics: PrefillMetrics,
        clock: Clock,
    ) -> None:
        """`slots`: of this side, from which records and seals are written. `page_tokens`: of its pages."""
        self._transfer = transfer
        self._slots = slots
        self._page_tokens = page_tokens
        self._window_bytes = window_bytes
        self._checksum = checksum
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock
        self._first: RoomId | None = None
        """The first room for which no window was left the last time: the next time it comes first."""

    def begin(self, job: Job, slot: Slot) -> None:
        """The room has its pages here and its destination: whole pages leave from now on."""
        grant = job.sender.grant
        if grant is None or job.way is None:
            raise AssertionError(f"room {job.sender.id} computes without a destination")
        if self._checksum is KvChecksum.PAGES:
            job.sequence.page_sum = PageSum(grant.prefix_tokens)
        job.push = Push(
            self._transfer,
            job.way,
            job.pages,
            self._page_tokens,
            grant,
            self._window_bytes,
            self._slots.view(slot),
            slot.index,
        )
        job.push.ready(job.computed)

    def send(self, jobs: Mapping[RoomId, Job], *, beside: bool) -> bool:
        """Look at every room that is sent: a few windows of all together leave, and no room is passed over
        for long. As `see`."""
        rooms, quota, moved = list(jobs), Quota(), False
        first, self._first = self._first, None
        start = rooms.index(first) if first is not None and first in jobs else 0
        for room in (*rooms[start:], *rooms[:start]):
            if jobs[room].sender.phase in GATED:
                if not quota.windows and self._first is None:
                    self._first = room
                moved |= self.see(jobs[room], quota, beside=beside)
        return moved

    def see(self, job: Job, quota: Quota | None = None, *, beside: bool) -> bool:
        """Look at what is under way and post what may follow. True when something moved. `beside`: a step is
        running."""
        push, sender = job.push, job.sender
        if push is None or push.waits or sender.grant is None or sender.sealed or sender.cause is not None:
            return False
        moved = self._advance(job, push, quota, beside=beside)
        if push.failure is not None:
            sender.note(Failed(Cause(Reason.TRANSFER_FAILED, push.failure)))
            return True
        now_ms = self._clock.now_ms()
        if moved:
            sender.progressed(now_ms)
        if push.written and not sender.written:
            sender.note(Written())
            self._transferred(job)
            self._reporter.seen(sender.id, Moment.WRITTEN, f"what this rank sends of {job.computed} tokens")
            moved = True
        if sender.written and (sender.phase is Phase.TRANSFERRING or not sender.elected):
            sender.progressed(now_ms)  # only another rank can be late now, and it counts that itself
        if push.stage is Stage.SEALED:
            sender.note(Sealed(sender.grant.generation))
            spent_ms = sender.phase_ms[Phase.TRANSFERRING] + now_ms - sender.entered_ms
            self._metrics.sealed(spent_ms / 1000)
            pages = f"{counted(len(sender.grant.pages), 'page')}, generation {sender.grant.generation}"
            self._reporter.note(sender.id, Moment.SEALED, f"{pages}, {job.overlap.told}")
        return moved

    def failed(self, job: Job) -> None:
        """What its pages took is counted all the same, if they were not all written."""
        if job.push is not None and not job.sender.written:
            self._transferred(job)

    def see_quiet(self, job: Job) -> bool:
        """Post nothing more for a room that failed. Until its writes have ended it keeps its pages, which
        they read (`source-pinned`). True when they have."""
        if job.push is None:
            job.sender.note(Fenced(Proof.UNEXPOSED))
            return True
        if job.push.drain(self._metrics.sent):
            job.sender.note(Fenced(Proof.QUIET))
            return True
        return False

    def _transferred(self, job: Job) -> None:
        self._metrics.transferred(job.overlap.spent_us / 1e6, job.overlap.hidden_us / 1e6)

    def _advance(self, job: Job, push: Push, quota: Quota | None, *, beside: bool) -> bool:
        if push.stage is not Stage.PAGES or not push.under_way:
            return push.advance(self._metrics.sent, quota)

        def sent(length: int) -> None:
            self._metrics.sent(length)
            job.overlap.length += length

        start_us = self._clock.host_us()
        moved = push.advance(sent, quota)
        job.overlap.looked(start_us, self._clock.host_us(), goes_on=push.under_way, beside=beside)
        return moved
