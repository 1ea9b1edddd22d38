"""Tests that the diagrams in the docs match the tables of moves. `--rewrite` draws them anew."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.pages.pool import PAGE_MOVES
from baton.rooms.phases import LOCAL_MOVES, RECEIVER_MOVES, SENDER_MOVES, Moves, Side
from tests.pages.diagrams import page_states
from tests.rooms.diagrams import mermaid

PAGES = Path(__file__).parents[2] / "docs" / "design"
DRAWN: Mapping[str, str] = {
    "sender": mermaid(Side.PREFILL),
    "receiver": mermaid(Side.DECODE),
    "pages": page_states(),
}
SHOWN_ON: Mapping[str, Path] = {
    "sender": PAGES / "hand-over.md",
    "receiver": PAGES / "hand-over.md",
    "pages": PAGES / "memory.md",
}


def section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- diagram: {name} -->\n)(.*?)(<!-- /diagram -->)", re.DOTALL)


@pytest.mark.parametrize("name", DRAWN)
def test_the_document_shows_the_table(name: str, rewrite: bool) -> None:
    page = SHOWN_ON[name]
    text = page.read_text(encoding="utf-8")
    found = section(name).findall(text)
    assert len(found) == 1, f"{page.name} needs one section <!-- diagram: {name} -->"
    drawn = f"```mermaid\n{DRAWN[name]}\n```\n"
    if rewrite:
        page.write_text(section(name).sub(lambda old: f"{old[1]}{drawn}{old[3]}", text), encoding="utf-8")
    else:
        assert found[0][1] == drawn


def test_the_design_notes_mark_no_other_diagram() -> None:
    pages = (page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    marked = [name for page in pages for name in re.findall(r"<!-- diagram: (.*?) -->", page)]
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
