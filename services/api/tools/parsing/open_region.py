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
    """A region that has begun."""

    region: TextRegion
    kind: RegionKind
    mark: str
    head: list[str] = field(default_factory=list)
    in_head: bool = False
    body: list[str] = field(default_factory=list)
    call: ConstrainedCallParser | None = None
    """That is being written as a grammar has it."""
    told: bool = field(default=False, init=False)
    """What is in it was told, or has begun to be."""
    arguments: list[str] = field(default_factory=list)
    form: CallSyntax | None = None
    """How its calls are written, once that is known."""
    json: JsonScanner | None = None
    """Its strings, where the body is JSON."""
    could_end: bool = field(default=False, init=False)
    """A mark of its end was met, which may be text."""
    next_attempt: int = field(default=0, init=False)
    """Characters of its body from which on it is read again."""
    size: int = field(default=0, init=False)
    """Characters of its body, where it is read ahead."""


def first_mark(text: str, marks: Sequence[str], *, last: bool) -> tuple[int, str | None]:
    """Where the first mark stands, of several there the longest; or from where one may begin, and None.
    `last`: nothing follows."""
    claimed = len(text) if last else min((_begun_from(text, mark) for mark in marks), default=len(text))
    found = min(
        ((at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0), default=(claimed, 0, "")
    )
    return (found[0], found[2]) if found[2] and found[0] < claimed else (claimed, None)


def head_counts(dialect: OutputMarkup, mark: str, text: str, *, last: bool) -> PrefixMatch:
    """Whether the mark with which a text begins counts: that of a head does where a head follows."""
    for region in dialect.regions:
        if mark in region.opens and region.head_begins is not None:
            return region.head_begins(text[len(mark) :], last)
    return PrefixMatch.YES


def _begun_from(text: str, mark: str) -> int:
    """Where the longest end of `text` begins that is a beginning of `mark`, and not all of it."""
    at = max(0, len(text) - len(mark) + 1)
    while (at := text.find(mark[0], at)) >= 0:
        if mark.startswith(text[at:]):
            return at
        at += 1
    return len(text)
