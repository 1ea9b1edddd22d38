"""Which sequences take part in the next step?

Those that run keep running; admitted ones join in the order of their rooms while there is space. Pure: the
same tables give the same step on every rank.
"""

from collections.abc import Iterable

from services.decode.job import Job
from services.rooms.phases import Phase


def unfinished(jobs: Iterable[Job]) -> list[Job]:
    """Admitted rooms whose sequences go on, in the order of `jobs`: oldest first."""
    return [
        job
        for job in jobs
        if job.receiver.phase is Phase.SUCCESS and not job.finished and not job.receiver.stopping
    ]


def next_batch(jobs: Iterable[Job], max_running: int) -> list[Job]:
    """`jobs`: all that there are, oldest first."""
    return unfinished(jobs)[:max_running]
