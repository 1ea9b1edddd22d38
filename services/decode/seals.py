"""Is what landed in a room's slot this tenancy's own, and whole?

What was read is either evidence or the room's end. Where the pages are summed, too, the evidence waits for
the sum (`landing.py`).
"""

from collections.abc import Iterable, Iterator
from math import inf
from typing import Final

from services.decode.job import Job
from services.engine.interface import PageSum
from services.ids import Generation
from services.pages.checksum import KvChecksum
from services.pages.errors import RecordCorrupt, RecordForeign
from services.pages.holdings import Holdings
from services.pages.layout import KvLayout
from services.pages.record import MetadataRecord, announced, read_slot, touched
from services.rooms.errors import Cause, PeerFault, Reason
from services.rooms.evidence import Failed, Landed, Sealed
from services.rooms.phases import Phase
from services.rooms.plurals import counted
from services.rooms.timeline import Moment
from services.wire.model_bounds import ModelBounds
from services.worker.reporter import Reporter

NEAR_S: Final = 0.01
"""What comes between a record and its seal takes a few milliseconds mostly."""


class Seals:
    """Keeps nothing of a room but in its job."""

    def __init__(
        self,
        holdings: Holdings,
        layout: KvLayout,
        bounds: ModelBounds,
        checksum: KvChecksum,
        reporter: Reporter,
        near_s: float = NEAR_S,
    ) -> None:
        """`near_s`: for how long a seal is near once its record is there."""
        self._holdings = holdings
        self._layout = layout
        self._bounds = bounds
        self._checksum = checksum
        self._reporter = reporter
        self._near_s = near_s

    def touched(self, jobs: Iterable[Job]) -> list[Job]:
        """Rooms whose pages are on their way, and whose seal may be there."""
        return [job for job, slot in self._awaited(jobs) if touched(slot)]

    def near(self, jobs: Iterable[Job], now_s: float) -> bool:
        """One of these rooms has its record, and has not had it for long: its seal is near."""
        for job, slot in self._awaited(jobs):
            if job.near_until_s is None and announced(slot):
                job.near_until_s = now_s + self._near_s
            if job.near_until_s is not None and now_s < job.near_until_s:
                return True
        return False

    def _awaited(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, memoryview]]:
        """Rooms whose pages are on their way and whose seal was not seen, with their slots."""
        holdings = self._holdings
        for job in jobs:
            if job.receiver.phase is Phase.TRANSFERRING and job.record is None:
                yield job, holdings.slots.view(holdings.get(job.receiver.id).slot)

    def look(self, job: Job) -> bool:
        """Look for the seal. What is not this tenancy's own ends the room (`stale-never-served`)."""
        receiver = job.receiver
        holding = self._holdings.get(receiver.id)
        generation = Generation(holding.slot.generation)
        try:
            slot, checked = self._holdings.slots.view(holding.slot), self._checksum is not KvChecksum.OFF
            record = read_slot(slot, receiver.id, generation, check_sum=checked)
            if record is None:
                return False
            self._check(job, record)
            receiver.note(Landed(generation, record.pages))
        except (RecordCorrupt, RecordForeign, PeerFault) as error:
            receiver.note(Failed(Cause(Reason.RECORD_CORRUPT, f"decode: {error}")))
            return True
        job.record = record
        job.choices[0].sequence.output[:] = [*job.request.output, record.first_token]
        if self._checksum is KvChecksum.PAGES:
            held = self._layout.pages_for(record.prompt_tokens) - receiver.pages_expected
            job.landed = PageSum(held * self._layout.page_tokens)
        else:
            self._sealed(job, record)
        return True

    def summed(self, job: Job, cause: Cause | None) -> None:
        """The sum of its pages is complete: `cause` is why they do not hold, if they do not."""
        if cause is not None:
            job.receiver.note(Failed(cause))
        elif job.record is not None:
            self._sealed(job, job.record)

    def _sealed(self, job: Job, record: MetadataRecord) -> None:
        generation = Generation(record.generation)
        job.receiver.note(Sealed(generation))
        checked = "" if job.landed is None else ", contents as computed"
        told = f"{counted(record.pages, 'page')}, generation {generation}{checked}"
        self._reporter.seen(job.receiver.id, Moment.LANDED, told)

    def _check(self, job: Job, record: MetadataRecord) -> None:
        want = (job.request.prefill_tokens, job.receiver.pages_expected)
        if (record.prompt_tokens, record.pages) != want:
            raise RecordCorrupt(
                f"record of room {record.room} says {record.prompt_tokens} tokens in {record.pages} pages,"
                f" expected {want[0]} in {want[1]}"
            )
        tokens = (record.first_token, *(token for token, _ in record.alternatives))
        if not self._bounds.knows(tokens):
            raise RecordCorrupt(f"record of room {record.room} names a token that the model does not have")
        logprobs = (record.first_logprob or 0.0, *(logprob for _, logprob in record.alternatives))
        if not all(each < inf for each in logprobs):
            raise RecordCorrupt(f"record of room {record.room} has a logprob that is no number")
