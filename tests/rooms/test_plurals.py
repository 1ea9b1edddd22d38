"""Tests of counts in texts: one thing is named in the singular."""

import pytest

from baton.rooms.plurals import counted


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 pages"), (1, "1 page"), (2, "2 pages")], ids=["none", "one", "two"]
)
def test_one_thing_is_not_told_as_many(number: int, told: str) -> None:
    assert counted(number, "page") == told
