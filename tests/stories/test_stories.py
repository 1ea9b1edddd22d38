"""Tests that each story still gives the replies that its file records. `--rewrite` records them anew, for
review."""

from pathlib import Path

import pytest

from tests.stories import whole_story
from tests.stories.language import ASKED, MARK, play

STORIES = sorted(Path(__file__).parent.rglob("*.txt"))
WHOLE = sorted((Path(__file__).parent / "whole").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_story(path: Path, rewrite: bool) -> None:
    told = path.read_text(encoding="utf-8")
    played = (whole_story.play if path in WHOLE else play)(told)
    if rewrite:
        path.write_text(played, encoding="utf-8")
    else:
        assert played == told


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_story_says_what_it_is_about_and_expects_something(path: Path) -> None:
    told = path.read_text(encoding="utf-8")
    assert told.startswith("# ")
    if path in WHOLE:
        assert told.rstrip().split("\n")[-3] == "router: rooms none; timers none", "it ends at idle"
        return
    assert any(block.split(f"{MARK}\n")[1:] for block in told.split("\n\n")) or f"\n{ASKED}" in told


def test_there_are_stories() -> None:
    assert len(STORIES) > len(WHOLE) > 15
