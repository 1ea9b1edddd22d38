"""Tests that docs/invariants.md names what holds each invariant. `--rewrite` writes the mutants' column."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.model.laws import Law
from tests.mutants.invariants import INVARIANTS
from tests.mutants.tables import MUTANTS

ROOT: Final = Path(__file__).parents[2]
SIMULATION: Final = ROOT / "tests" / "sim"
PAGE: Final = ROOT / "docs" / "invariants.md"
NAME: Final = re.compile(r"`([a-z]+(?:-[a-z]+)*)`")
TEST: Final = re.compile(r"`(tests/[^`]+)`")
COLUMNS: Final = 5


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    says: str
    code: str
    held_by: str
    mutants: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == COLUMNS, line
            found.append(Row(cells[0].strip("`"), *cells[1:]))
    return found


def mutants_of(invariant: str) -> str:
    return ", ".join(f"`{each.name}`" for each in MUTANTS if each.invariant == invariant)


ROWS: Final = rows()


def test_every_invariant_has_a_row_and_no_cell_is_empty() -> None:
    assert sorted(row.name for row in ROWS) == sorted(INVARIANTS)
    assert [row for row in ROWS if not all((row.says, row.code, row.held_by, row.mutants))] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_code_that_keeps_it_names_it(row: Row) -> None:
    for file in re.findall(r"`([^`]+)`", row.code):
        text = (ROOT / "services" / file).read_text(encoding="utf-8")
        assert re.search(rf"(?<![a-z-]){row.name}(?![a-z-])", text), f"services/{file} does not name it"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_said_to_hold_it_is_there(row: Row) -> None:
    for test in TEST.findall(row.held_by):
        assert (ROOT / test).is_file(), test
    words = re.findall(r"\b(?:law|simulation|type)\b", row.held_by)
    assert words or TEST.search(row.held_by), row.held_by
    if "law" in words:
        assert row.name in {law.value for law in Law}
    if "simulation" in words:
        checks = [path for path in SIMULATION.glob("*.py") if not path.name.startswith("test_")]
        assert any(f'"{row.name}"' in path.read_text(encoding="utf-8") for path in checks)


def test_what_the_code_names_has_a_row() -> None:
    used: defaultdict[str, list[str]] = defaultdict(list)
    for path in (ROOT / "services").rglob("*.py"):
        for name in NAME.findall(path.read_text(encoding="utf-8")):
            if name in INVARIANTS or "-" in name:
                used[name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in used.items() if name not in INVARIANTS} == {}


def test_the_mutants_are_those_that_there_are(rewrite: bool) -> None:
    text = PAGE.read_text(encoding="utf-8")
    told = text
    for row in ROWS:
        old = f"| `{row.name}` | {row.says} | {row.code} | {row.held_by} | {row.mutants} |"
        assert told.count(old) == 1, row.name
        told = told.replace(old, f"{old.removesuffix(f'{row.mutants} |')}{mutants_of(row.name)} |")
    if rewrite:
        PAGE.write_text(told, encoding="utf-8")
    else:
        assert told == text, "write it anew: pytest tests/verify --rewrite"
