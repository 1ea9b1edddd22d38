"""Which parts of which prompts does the next step compute?

Oldest room first, chunk by chunk, several prompts in one step, up to a budget of tokens. Pure: the same
tables give the same step on every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.prefill.job import Job


@dataclass(frozen=True, slots=True)
class Part:
    """Positions [start, stop) of one room's prompt, and of the output it goes on behind."""

    job: Job
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """The end of what is known: the room's first token is drawn with it."""
        return self.stop == self.job.request.prefill_tokens


def next_parts(jobs: Iterable[Job], budget_tokens: int) -> list[Part]:
    """Fill one step. `jobs`: rooms that may be computed, oldest first."""
    parts: list[Part] = []
    for job in jobs:
        if budget_tokens == 0:
            break
        take = min(job.request.prefill_tokens - job.computed, budget_tokens)
        if take > 0:
            parts.append(Part(job, job.computed, job.computed + take))
            budget_tokens -= take
    return parts
