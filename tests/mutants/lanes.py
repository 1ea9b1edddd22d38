"""Runs of all mutants, several at a time, each in its own process and within its time budget."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Final

from tests.apart import NoAnswer, answer_of
from tests.mutants.checks import Finding, find
from tests.mutants.mutant import Check, Mutant
from tests.mutants.patched import put_in_place
from tests.suite.marks import starts

BUDGET_S: Final = 240.0
"""Longest time for one mutant, seconds. The slowest takes ten on an idle core, which others may share."""
TOGETHER_S: Final = 900.0
"""Longest time for all stories or all tests that see some mutant, one after the other on the unchanged
source, seconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    found: Finding | None
    problem: str
    """Why there is no answer, if there is none."""
    seconds: float

    def catches(self, mutant: Mutant) -> bool:
        """Return whether the mutant was caught by its own invariant, with the symptom of its field report if
        it has one."""
        if self.found is None or self.found.invariant != mutant.invariant:
            return False
        return mutant.report is None or mutant.report.symptom in self.found.trace

    @property
    def clean(self) -> bool:
        return self.found is None and not self.problem


@dataclass(frozen=True, slots=True)
class Errand:
    name: str
    mutant: Mutant | None
    """The mutant to run, or None for the source as it is."""
    checks: Sequence[Check]
    budget_s: float = BUDGET_S

    def run(self) -> Outcome:
        starts("search")
        started = time.monotonic()
        found, problem = None, ""
        try:
            found = answer_of(_first, self, limit_s=self.budget_s)
        except NoAnswer as error:
            problem = str(error)
        return Outcome(self.name, found, problem, round(time.monotonic() - started, 2))


def errands(mutants: Iterable[Mutant]) -> list[Errand]:
    return [Errand(each.name, each, each.checks) for each in mutants]


def controls(mutants: Iterable[Mutant]) -> list[Errand]:
    """Return errands that run each of the mutants' checks once on the unchanged source."""
    checks = dict.fromkeys(check for mutant in mutants for check in mutant.checks)
    stories = [check for check in checks if check.kind == "story"]
    tests = dict.fromkeys(test for check in checks if check.kind == "suite" for test in check.what.split())
    suite = [Check("suite", " ".join(tests))] if tests else []
    searches = [check for check in checks if check.kind in ("model", "sim")]
    return [
        *(Errand(f"control: {each[0].kind}", None, each, TOGETHER_S) for each in (stories, suite) if each),
        *(Errand(f"control: {check}", None, [check]) for check in searches),
    ]


def judge(all_errands: Iterable[Errand], jobs: int) -> Iterator[Outcome]:
    """Run all errands, `jobs` at a time, and yield each outcome as soon as it is there."""
    with ThreadPoolExecutor(jobs) as lanes:
        running = [lanes.submit(each.run) for each in all_errands]
        for each in as_completed(running):
            yield each.result()


def _first(errand: Errand) -> Finding | None:
    mutant = errand.mutant
    if mutant is not None:
        put_in_place(mutant)
    for check in errand.checks:
        found = find(check, mutant.invariant if mutant is not None else "none")
        if found is not None:
            return found
    return None
