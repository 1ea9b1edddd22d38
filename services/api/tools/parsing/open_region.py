"""A region of an answer that has begun, and the search for the marks that end it.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.api.tools.parsing.constrained_parser import ConstrainedCallParser
from baton.api.tools.parsing.json_scanner import JsonScanner
from baton.api.tools.parsing.output_markup import (
    CallSyntax,
    OutputMarkup,
    PrefixMatch,
    RegionKind,
    TextRegion,
)


@dataclass(slots=True)
class OpenRegion:
    """A region of an answer that has begun."""

    region: TextRegion
    kind: RegionKind
    mark: str
    head: list[str] = field(default_factory=list)
    in_head: bool = False
    body: list[str] = field(default_factory=list)
    call: ConstrainedCallParser | None = None
    """Parser of a call that a grammar constrains, while it is being written."""
    is_emitted: bool = field(default=False, init=False)
    """The call was emitted, or its start was."""
    arguments: list[str] = field(default_factory=list)
    """Pieces of the arguments of `call`."""
    syntax: CallSyntax | None = None
    """Syntax of the calls, once it is known."""
    json: JsonScanner | None = None
    """Scanner of the body's strings. None if the body is no JSON."""
    could_end: bool = field(default=False, init=False)
    """A closing mark was met, which may be part of an argument."""
    next_attempt: int = field(default=0, init=False)
    """Size of the body, in characters, from which on it is parsed again."""
    size: int = field(default=0, init=False)
    """Characters of the body. Counted only if the syntax parses ahead."""


def first_mark(text: str, marks: Sequence[str], *, last: bool) -> tuple[int, str | None]:
    """Return the index of the first mark, and the mark. The longest one wins if several begin there.

    Without a mark, returns the index from which on one may begin, and None.
    `last`: the text is all of the answer, so that no mark is cut off.
    """
    open_from = (
        len(text) if last else min((_partial_mark_at(text, mark) for mark in marks), default=len(text))
    )
    found = min(
        ((at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0), default=(open_from, 0, "")
    )
    return (found[0], found[2]) if found[2] and found[0] < open_from else (open_from, None)


def head_counts(dialect: OutputMarkup, mark: str, text: str, *, last: bool) -> PrefixMatch:
    """Return whether the mark at the beginning of a text counts.

    The mark of a head needs a head behind it.
    """
    for region in dialect.regions:
        if mark in region.opens and region.head_begins is not None:
            return region.head_begins(text[len(mark) :], last)
    return PrefixMatch.YES


def _partial_mark_at(text: str, mark: str) -> int:
    """Return the index of the longest end of `text` that is a proper beginning of `mark`."""
    at = max(0, len(text) - len(mark) + 1)
    while (at := text.find(mark[0], at)) >= 0:
        if mark.startswith(text[at:]):
            return at
        at += 1
    return len(text)
