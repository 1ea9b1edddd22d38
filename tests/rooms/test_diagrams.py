"""Are the diagrams in the docs the ones that the tables draw? `--rewrite` draws them anew."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.pages.pool import PAGE_MOVES
from services.rooms.phases import LOCAL_MOVES, RECEIVER_MOVES, SENDER_MOVES, Moves, Side
from tests.pages.diagrams import page_states
from tests.rooms.diagrams import mermaid

DOC = Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md"
DRAWN: Mapping[str, str] = {
    "sender": mermaid(Side.PREFILL),
    "receiver": mermaid(Side.DECODE),
    "pages": page_states(),
}


def section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- diagram: {name} -->\n)(.*?)(<!-- /diagram -->)", re.DOTALL)


@pytest.mark.parametrize("name", DRAWN)
def test_the_document_shows_the_table(name: str, rewrite: bool) -> None:
    text = DOC.read_text(encoding="utf-8")
    found = section(name).findall(text)
    assert len(found) == 1, f"docs/ARCHITECTURE.md needs one section <!-- diagram: {name} -->"
    drawn = f"```mermaid\n{DRAWN[name]}\n```\n"
    if rewrite:
        DOC.write_text(section(name).sub(lambda old: f"{old[1]}{drawn}{old[3]}", text), encoding="utf-8")
    else:
        assert found[0][1] == drawn


def test_the_document_marks_no_other_diagram() -> None:
    marked = re.findall(r"<!-- diagram: (.*?) -->", DOC.read_text(encoding="utf-8"))
    assert sorted(marked) == sorted(DRAWN)


@pytest.mark.parametrize(
    ("name", "moves"),
    [("sender", SENDER_MOVES), ("receiver", RECEIVER_MOVES), ("receiver", LOCAL_MOVES)],
    ids=["sender", "receiver", "local"],
)
def test_every_move_of_a_room_is_drawn(name: str, moves: Moves) -> None:
    for (phase, vote), (after, effect) in moves.items():
        pattern = rf"{phase.value} --> {after.value}: \w+ ranks? {vote.name} / {effect.value}"
        assert len(re.findall(pattern, DRAWN[name])) == 1


def test_every_move_of_a_page_is_drawn() -> None:
    for before, after in PAGE_MOVES:
        assert DRAWN["pages"].count(f"{before.value} --> {after.value}: ") == 1
