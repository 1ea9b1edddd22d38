"""Tests that links, commands and words of make in the docs are right, and that prose is wrapped."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from baton.cli.main import app

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    page.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md")
    for page in ROOT.glob(pattern)
)
LINK: Final = re.compile(r"\]\(<?([^)\s>]+)>?\)")
REFERENCE: Final = re.compile(r"^\[([^\]]+)\]: +(\S+)$", re.MULTILINE)
USED: Final = re.compile(r"\]\[([^\]]+)\]")
ELSEWHERE: Final = ("http://", "https://", "mailto:")
CODE: Final = re.compile(r"`[^`\n]*`")
FENCE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
WIDTH: Final = 130
"""Columns of a line of prose. Prose is wrapped at 100; a renamed path may make a line wider."""
UNWRAPPED: Final = re.compile(r" *(\||#|!\[|\[[^\]]+\]: |<)")
"""Lines that cannot be wrapped: tables, headings, pictures, addresses, HTML."""
GENERATED: Final = frozenset({"settings.md", "metrics.md", "behaviours.md", "models.md"})
TYPED: Final = re.compile(r"(?:do +)?(?:\w+=\S+ +)*(?:\S+/)?baton +([a-z].*)")


@cache
def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def prose_of(page: Path) -> str:
    """Return the page's text without code blocks, and without brackets in inline code, which are no links."""
    return CODE.sub(lambda code: re.sub(r"[][]", " ", code[0]), FENCE.sub("", text_of(page)))


@cache
def headings(page: Path) -> frozenset[str]:
    """The names by which GitHub reaches the headings of a page."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", FENCE.sub("", text_of(page)), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        again = found.get(name, 0)
        found[name] = again + 1
        names.add(f"{name}-{again}" if again else name)
    return frozenset(names)


def links(page: Path) -> Iterator[str]:
    yield from LINK.findall(prose_of(page))
    yield from (target for _, target in REFERENCE.findall(prose_of(page)))


def broken(page: Path, target: str) -> bool:
    if target.startswith(ELSEWHERE):
        return False
    path, _, heading = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    if not file.exists():
        return True
    if not heading:
        return False
    return file.suffix != ".md" or heading not in headings(file.resolve().relative_to(ROOT))


def typed() -> list[tuple[str, str]]:
    """Yield each command of baton on a page, with its place and words."""
    return sorted(
        {
            (str(page), words[1].strip())
            for page in PAGES
            for block in FENCE.findall(text_of(page))
            for line in block.replace("\\\n", " ").splitlines()
            for command in re.split("; |&& |[|] ", line.removeprefix("$ ").partition("  #")[0])
            if (words := TYPED.match(command.strip()))
        }
    )


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    assert [target for target in links(page) if broken(page, target)] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_reference_is_defined_and_used(page: Path) -> None:
    defined = [name for name, _ in REFERENCE.findall(prose_of(page))]
    assert len(defined) == len(set(defined))
    assert set(USED.findall(prose_of(page))) == set(defined)


def test_a_broken_link_is_found() -> None:
    readme = Path("README.md")
    assert broken(readme, "docs/no-such-page.md")
    assert broken(readme, "docs/verification.md#no-such-heading")
    assert broken(readme, "#no-such-heading")
    assert not broken(readme, "docs/verification.md#late-writes")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=str)
def test_prose_is_wrapped(page: Path) -> None:
    lines = FENCE.sub("", text_of(page)).splitlines()
    wide = [line for line in lines if len(line) > WIDTH and " " in line.strip() and not UNWRAPPED.match(line)]
    assert wide == []


def test_every_word_of_make_is_one() -> None:
    words = set(re.findall(r"^([a-z][a-z-]*):", text_of(Path("Makefile")), re.MULTILINE))
    told = {
        (str(page), word)
        for page in PAGES
        for word in re.findall(r"(?:`|^\$ |^)make ([a-z][a-z-]*)", text_of(page), re.MULTILINE)
    }
    assert len(told) > 10
    assert {each for each in told if each[1] not in words} == set()


def test_every_command_of_baton_can_be_typed() -> None:
    shown = typed()
    assert len(shown) > 20
    assert [each for each in shown if not _can_be_typed(each[1])] == []


def _can_be_typed(line: str) -> bool:
    words = shlex.split(line)
    at: Any = typer.main.get_command(app)
    while words and words[0] in (groups := getattr(at, "commands", {})):
        at = groups[words.pop(0)]
    known = {option for each in at.params for option in each.opts} | {"--help"}
    named = {word.partition("=")[0] for word in words if re.fullmatch(r"--[\w-]+(=.*)?", word)}
    return not hasattr(at, "commands") and named <= known
