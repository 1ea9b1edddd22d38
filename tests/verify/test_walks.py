"""Tests that the walks in docs/ARCHITECTURE.md and the files in the design notes match the code."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
STATION: Final = re.compile(r"`([A-Za-z_]+)` \(`([a-z_/]+\.py)`")
FILE: Final = re.compile(r"`((?:services|tests)/[a-z_/]+\.(?:py|c))`")


@cache
def page() -> str:
    return (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")


def walks() -> dict[str, list[tuple[str, str]]]:
    """Return the stations of each walk, as name and file."""
    text = page().split("## Four walks\n", 1)[1].split("\n## ", 1)[0]
    parts = re.split(r"^\*\*(.+)\*\*$", text, flags=re.MULTILINE)[1:]
    return {title: STATION.findall(rows) for title, rows in zip(parts[::2], parts[1::2], strict=True)}


def names_in(file: str) -> set[str]:
    """Return the names that the file defines: classes, functions, methods and constants."""
    tree = ast.parse((ROOT / "services" / file).read_text(encoding="utf-8"))
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, defined)}
    constants = (node.target for node in tree.body if isinstance(node, ast.AnnAssign))
    return names | {each.id for each in constants if isinstance(each, ast.Name)}


def test_the_walks_are_those_of_a_prompt_a_page_a_cause_and_a_token() -> None:
    assert list(walks()) == ["A prompt in", "A page", "A cause", "A token out"]


@pytest.mark.parametrize("title", ["A prompt in", "A page", "A cause", "A token out"])
def test_each_station_of_a_walk_is_there_and_is_named_once(title: str) -> None:
    stations = walks()[title]
    assert len(stations) >= 8
    assert len(set(stations)) == len(stations)
    for name, file in stations:
        assert name in names_in(file), f"{file} defines no {name}"


@pytest.mark.parametrize("pages", ["CONTRIBUTING.md", "docs/*.md", "docs/design/*.md"])
def test_each_file_that_a_page_names_is_there(pages: str) -> None:
    named = {file for page in ROOT.glob(pages) for file in FILE.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 5
    assert not {file for file in named if not (ROOT / file).is_file()}
