"""Which sequences take part in the next step?

Those that run keep running; those of admitted rooms join in the order of their rooms, a room's choices in
theirs, while there is space. Pure: the same tables give the same step on every rank.

A further choice begins with a row of up to a page of tokens, where others have one token: so many begin in
one step that it computes no more tokens than a full batch does, or one. So those that run beside them wait
for no more than such a step.
"""

from collections.abc import Iterable
from typing import NamedTuple

from services.decode.job import Choice, Job
from services.rooms.phases import Phase


class Part(NamedTuple):
    """Of a step."""

    job: Job
    choice: Choice


def unfinished(jobs: Iterable[Job]) -> list[Part]:
    """Choices of admitted rooms that go on, in the order of `jobs`, oldest first, and of each room's."""
    return [Part(job, job.choices[place]) for job in jobs if _runs(job) for place in job.ends.going_on]


def how_many(jobs: Iterable[Job]) -> int:
    """Sequences that go on."""
    return sum(len(job.ends.going_on) for job in jobs if _runs(job))


def _runs(job: Job) -> bool:
    receiver = job.receiver
    return receiver.phase is Phase.SUCCESS and not job.finished and not receiver.stopping


def next_batch(jobs: Iterable[Job], max_running: int) -> list[Part]:
    """`jobs`: all that there are, oldest first."""
    running = unfinished(jobs)[:max_running]
    tokens = sum(not part.choice.forks for part in running)
    batch: list[Part] = []
    begins = False
    for part in running:
        if part.choice.forks:
            row = part.choice.row
            tokens += row.stop - row.start
            if begins and tokens > max_running:
                continue
            begins = True
        batch.append(part)
    return batch
