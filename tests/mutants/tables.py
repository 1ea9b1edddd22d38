"""Parser of the mutant tables beside this file. A mutant has this form:

# name
# Which slip it is.
breaks INVARIANT in QUALIFIED NAME       a function, class or constant of services/, as `Registry.abandon`
seen by story NAME, model SCOPE          also: sim PROFILE/FIRST:END, suite FILE::TEST
reported in THREAD: what it tells        of a field defect,
| what the trace must show               and how that reads here
@@
 a statement that stays                  before: the lines that stay or go, after: those that stay or come
-a statement or expression that goes
+a statement or expression that comes

Before and after are parsed: layout, comments and docstrings do not matter. Each is consecutive statements,
one expression, or the header of a compound statement (`for room in rooms:`) whose body stays. What is before
occurs exactly once in the place. A name that several files define has its package or module before it
(`bootstrap.RoomController.end`). Code outside all functions and classes is in its module (`rooms.phases`). A
fault of the model's own code is in `tests.model` and the name. An edit of another place names it: `@@
QUALIFIED NAME`.
"""

import re
import textwrap
from pathlib import Path
from typing import Final

from tests.mutants.mutant import Check, Edit, Mutant, Report

HERE: Final = Path(__file__).parent
_TABLES: Final = """
field core turns memory prefixes workers groups growth local both bootstrap wire trust grammars choices
scores drafting answers states
"""
TABLES: Final = tuple(_TABLES.split())


def read_table(text: str) -> list[Mutant]:
    return [_read("# " + block) for block in text.removeprefix("# ").split("\n\n# ")]


def _read(block: str) -> Mutant:
    head, *hunks = re.split(r"\n@@ ?(.*)\n", block.rstrip("\n"))
    words = [line[2:] for line in head.split("\n") if line.startswith("# ")]
    facts = "\n".join(line for line in head.split("\n") if not line.startswith(("# ", "| ")))
    said = dict(line.split(" ", 1) for line in facts.replace("\n    ", " ").split("\n"))
    invariant, place = said.pop("breaks").split(" in ")
    checks = [Check(*check.split(" ", 1)) for check in said.pop("seen").removeprefix("by ").split(", ")]
    report = None
    if "reported" in said:
        thread, tells = said.pop("reported").removeprefix("in ").split(": ", 1)
        symptom = "\n".join(line[2:] for line in head.split("\n") if line.startswith("| "))
        report = Report(thread, tells, symptom)
    if said:
        raise ValueError(f"{words[0]}: {said}")
    edits = [
        Edit(other or place, _lines(hunk, " -"), _lines(hunk, " +"))
        for other, hunk in zip(hunks[::2], hunks[1::2], strict=True)
    ]
    return Mutant(words[0], " ".join(words[1:]), invariant, edits, checks, report)


def _lines(hunk: str, kinds: str) -> str:
    return textwrap.dedent(
        "".join(line[1:] + "\n" for line in hunk.split("\n") if line[:1] in kinds and line)
    )


MUTANTS: Final = tuple(
    mutant for name in TABLES for mutant in read_table((HERE / f"{name}.txt").read_text(encoding="utf-8"))
)
