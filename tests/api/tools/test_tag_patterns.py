"""Patterns of calls between tags: a search looks at each character once."""

import pytest

from baton.openai import tag_calls
from baton.openai.tag_calls import TagFormat

FORMATS = {name: each for name, each in vars(tag_calls).items() if isinstance(each, TagFormat)}


@pytest.mark.parametrize("name", FORMATS)
def test_no_search_begins_with_whitespace_that_may_be_long(name: str) -> None:
    """Such a pattern takes the square of the length of a run of line feeds, which a model may write."""
    patterns = tag_calls._patterns(FORMATS[name])
    for each in (patterns.ends, patterns.next_call):
        branches = each.pattern.removeprefix("(?P<inner>")
        assert not branches.startswith(("(?:\\s*)", "\\s*"))
