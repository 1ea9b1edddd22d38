"""Which sequences take part in the next step?

Those that run keep running; admitted ones join in the order of their rooms while there is space. Pure: the
same tables give the same step on every rank.
"""

from collections.abc import Iterable

from services.decode.job import Job


def next_batch(jobs: Iterable[Job], max_running: int) -> list[Job]:
    """`jobs`: admitted rooms whose sequences go on, oldest first."""
    batch: list[Job] = []
    for job in jobs:
        if len(batch) == max_running:
            break
        batch.append(job)
    return batch
