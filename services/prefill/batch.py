"""Which parts of which prompts does the next step compute?

Oldest room first, chunk by chunk, several prompts in one step, up to a budget of tokens. Pure: the same
tables give the same step on every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.prefill.job import Job


@dataclass(frozen=True, slots=True)
class Part:
    """Positions [start, stop) of one room's prompt."""

    job: Job
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """The prompt's end: the first token is drawn with it."""
        return self.stop == len(self.job.request.prompt)


def next_parts(jobs: Iterable[Job], budget_tokens: int) -> list[Part]:
    """Fill one step. `jobs`: rooms that may be computed, oldest first."""
    parts: list[Part] = []
    for job in jobs:
        if budget_tokens == 0:
            break
        take = min(len(job.request.prompt) - job.computed, budget_tokens)
        if take > 0:
            parts.append(Part(job, job.computed, job.computed + take))
            budget_tokens -= take
    return parts
