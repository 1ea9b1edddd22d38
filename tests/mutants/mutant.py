"""What is a mutant? A small fault in the product's source, the invariant that it breaks, and the checks that
must say so."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


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
    """What the report tells of, as it reads in the trace."""


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    slip: str
    """Which slip of a programmer it is."""
    invariant: str
    file: str
    """Under services/; or with tests/, of what `tests.model` does in its stead."""
    edits: Sequence[tuple[str, str]]
    """(old, new): whole lines; each old text stands in the file exactly once."""
    checks: Sequence[Check]
    """In this order, until one finds something."""
    report: Report | None = None

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)

    @property
    def path(self) -> Path:
        return ROOT / ("" if self.file.startswith("tests/") else "services") / self.file

    def source(self) -> str:
        """The file with the fault in it. Raises Drifted where the file has changed under the mutant."""
        text = "\n" + self.path.read_text(encoding="utf-8")
        for old, new in self.edits:
            count = text.count("\n" + old)
            if count != 1:
                raise Drifted(f"{self.name}: stands {count} times in {self.path.relative_to(ROOT)}:\n{old}")
            text = text.replace("\n" + old, "\n" + new)
        return text[1:]


class Drifted(Exception):
    """The source is not any more what the mutant was made from: bring the mutant up to date."""
