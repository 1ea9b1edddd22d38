"""Patterns of calls between tags: a search looks at each character once."""

import pytest

from baton.api.tools.formats import tagged_calls
from baton.api.tools.formats.tagged_calls import TagFormat

FORMATS = {name: each for name, each in vars(tagged_calls).items() if isinstance(each, TagFormat)}


@pytest.mark.parametrize("name", FORMATS)
def test_no_search_begins_with_whitespace_that_may_be_long(name: str) -> None:
    """Such a pattern takes the square of the length of a run of line feeds."""
    patterns = tagged_calls._patterns(FORMATS[name])
    for each in (patterns.ends, patterns.next_call):
        branches = each.pattern.removeprefix("(?P<inner>")
        assert not branches.startswith(("(?:\\s*)", "\\s*"))
