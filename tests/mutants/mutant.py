"""The data of a mutant: a small fault in the product's source, the invariant it breaks, and the checks that
must catch it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.source import ROOT, Drifted, Edit, find, mutated

__all__ = ["ROOT", "Check", "Drifted", "Edit", "Mutant", "Report"]


@dataclass(frozen=True, slots=True)
class Check:
    kind: str
    """
    story   a story of tests/stories; the invariant is the first that its opening words name
    model   a scope of tests/model; the invariant is the broken law's
    sim     seeds of tests/sim, `PROFILE/FIRST:END`; the invariant is the one that it names
    suite   a test of the ordinary suite, under tests/; stands for the mutant's own invariant
    """
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """A public report of the same defect in the field."""

    thread: str
    tells: str
    symptom: str
    """The reported symptom, as it reads in the trace."""


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    slip: str
    """The programmer's mistake that the mutant stands for."""
    invariant: str
    edits: Sequence[Edit]
    checks: Sequence[Check]
    """Checks that run in this order until one finds something."""
    report: Report | None = None

    def sources(self) -> dict[Path, str]:
        """Return the text of each file with the fault in it. Raises Drifted if an edit does not apply exactly
        once."""
        return mutated(self.name, self.edits)

    def files(self) -> list[Path]:
        """The files with the places of its edits. Raises Drifted."""
        return [find(self.name, edit.place)[0].path for edit in self.edits]
