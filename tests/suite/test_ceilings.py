"""Tests that counts of unwanted things in sources, docs and tests do not rise."""

from collections.abc import Callable
from typing import Final

import pytest

from tests.suite import ceilings

SLACK: Final = 0.02
"""Part of a ceiling by which a count may be below it before the ceiling has to be lowered."""
CEILINGS: Final[dict[Callable[[], int], int]] = {
    ceilings.fragments: 0,
    ceilings.forbidden_names: 0,
    ceilings.long_sentences_of_docs: 0,
    ceilings.long_sentences_of_docstrings: 2,
    ceilings.equal_file_names: 0,
    ceilings.empty_packages: 0,
    ceilings.long_files: 0,
    ceilings.long_functions: 0,
    ceilings.private_reads: 40,
    ceilings.crowded_folders: 0,
}


@pytest.mark.parametrize("count", CEILINGS, ids=lambda each: str(each.__name__))
def test_a_count_does_not_rise(count: Callable[[], int]) -> None:
    found, ceiling = count(), CEILINGS[count]
    assert found <= ceiling, f"{count.__name__}: {found}, and {ceiling} at most"
    assert found >= ceiling * (1 - SLACK) - 1, f"{count.__name__}: only {found}: lower its ceiling to that"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Short. " * 40, 0),
        ("word " * 31, 1),
        ("word " * 31 + ". Short: " + "word " * 31, 2),
        ("word " * 20 + "\n\n" + "word " * 20, 0),
        ("* " + "word " * 20 + "\n* " + "word " * 20, 0),
        ("word " * 25 + "[a link of many words here](there.md#with-words) `a b c d e`", 1),
    ],
    ids=["many short ones", "one long one", "a colon ends one", "paragraphs", "a list", "a link and code"],
)
def test_a_sentence_has_thirty_words_at_most(text: str, count: int) -> None:
    assert ceilings.long_sentences(text) == count
