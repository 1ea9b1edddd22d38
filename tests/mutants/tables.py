"""Which mutants are there? Those of the tables beside this file, in this form:

# name
# Which slip it is.
breaks INVARIANT in FILE                 under services/ (or tests/model/…: a fault of the world around it)
seen by story NAME, model SCOPE          also: sim PROFILE/FIRST:END, suite FILE::TEST
reported in THREAD: what it tells        of a field defect,
| what the trace must show               and how that reads here
@@
 a line that stays                       each hunk stands in the file exactly once
-a line that goes
+a line that comes
"""

from pathlib import Path
from typing import Final

from tests.mutants.mutant import Check, Mutant, Report

HERE: Final = Path(__file__).parent
_TABLES: Final = """
field core memory prefixes workers groups growth local both bootstrap wire trust grammars choices scores
drafting answers
"""
TABLES: Final = tuple(_TABLES.split())


def read_table(text: str) -> list[Mutant]:
    return [_read("# " + block) for block in text.removeprefix("# ").split("\n\n# ")]


def _read(block: str) -> Mutant:
    head, *hunks = block.rstrip("\n").split("\n@@\n")
    words = [line[2:] for line in head.split("\n") if line.startswith("# ")]
    facts = "\n".join(line for line in head.split("\n") if not line.startswith(("# ", "| ")))
    said = dict(line.split(" ", 1) for line in facts.replace("\n    ", " ").split("\n"))
    invariant, file = said.pop("breaks").split(" in ")
    checks = [Check(*check.split(" ", 1)) for check in said.pop("seen").removeprefix("by ").split(", ")]
    report = None
    if "reported" in said:
        thread, tells = said.pop("reported").removeprefix("in ").split(": ", 1)
        symptom = "\n".join(line[2:] for line in head.split("\n") if line.startswith("| "))
        report = Report(thread, tells, symptom)
    if said:
        raise ValueError(f"{words[0]}: {said}")
    edits = [(_lines(hunk, " -"), _lines(hunk, " +")) for hunk in hunks]
    return Mutant(words[0], " ".join(words[1:]), invariant, file, edits, checks, report)


def _lines(hunk: str, kinds: str) -> str:
    return "".join(line[1:] + "\n" for line in hunk.split("\n") if line[:1] in kinds and line)


MUTANTS: Final = tuple(
    mutant for name in TABLES for mutant in read_table((HERE / f"{name}.txt").read_text(encoding="utf-8"))
)
