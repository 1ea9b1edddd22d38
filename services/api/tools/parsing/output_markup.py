"""Regions of a model's answer, and the marks between which they stand.

Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from baton.api.tools.parsing.output_parts import CompleteToolCall, MalformedToolCall, ToolSchemas


class RegionKind(Enum):
    """What stands between two marks."""

    REASONING = "thought"
    CALLS = "calls"
    CONTENT = "said"


Read = Callable[[str, str, ToolSchemas], Sequence[CompleteToolCall]]
"""The calls in a body, behind its head. Raises Unreadable."""


class ParsedCalls(NamedTuple):
    """Calls at the beginning of a text that may go on."""

    calls: Sequence[CompleteToolCall]
    end: int
    """Where the text goes on behind them."""


class PrefixMatch(Enum):
    """Whether a text begins as a call does."""

    NO = "no"
    PARTIAL = "perhaps"
    """It is too short to know."""
    YES = "yes"


def _any_begins(_: str, __: ToolSchemas) -> PrefixMatch:
    return PrefixMatch.YES


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """One way in which calls are written behind their mark."""

    begins: Callable[[str, ToolSchemas], PrefixMatch] = _any_begins
    """Whether a text, which has no whitespace before it, begins so."""
    parse_ahead: Callable[[str, ToolSchemas, bool], ParsedCalls | None] | None = None
    """Reads the calls of a text that holds marks which are text, where it is not JSON. The flag: nothing
    follows the text. None: JSON, in whose strings marks are text."""


JSON_SYNTAX = CallSyntax()


def _no_calls(_: str, body: str, __: ToolSchemas) -> Sequence[CompleteToolCall]:
    raise MalformedToolCall(body)


@dataclass(frozen=True, slots=True)
class TextRegion:
    """A part of the text between marks."""

    kind: RegionKind
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    """None: it lasts to the end of the text."""
    until: tuple[str, ...] = ()
    """Marks that end it and belong to what follows."""
    head: str = ""
    """The mark that ends what stands before the body, if anything does."""
    head_begins: Callable[[str, bool], PrefixMatch] | None = None
    """Whether a text behind the region's mark begins as its head does; else the mark is text. The flag:
    nothing follows the text."""
    sort: Callable[[str], RegionKind] | None = None
    """What a head makes of it."""
    bare: bool = False
    """Its mark is part of its body, and counts where nothing was said before it alone."""
    in_body: bool = False
    """Its mark is part of its body, and counts everywhere."""
    read: Read = _no_calls
    bodies: tuple[CallSyntax, ...] = (JSON_SYNTAX,)


class Previous(Enum):
    """What stands directly before a place in an answer, whitespace aside."""

    START = "start"
    """The answer begins there."""
    REASONING = "reasoning"
    CALL = "call"
    CONTENT = "content"


class SectionMark(NamedTuple):
    """A mark around calls or around content. It is dropped where it can stand, and is content elsewhere."""

    text: str
    after: frozenset[Previous] = frozenset()
    """It is dropped directly behind one of these."""
    before_calls: bool = False
    """It is dropped directly before a call."""
    at_end: bool = False
    """It is dropped at the end of an answer."""
    opens: str = ""
    """The mark of the same section's beginning. Both are dropped if nothing stands between them."""


def section_marks(opens: str, closes: str) -> tuple[SectionMark, ...]:
    """Return the marks around a section of calls."""
    return (
        SectionMark(opens, before_calls=True),
        SectionMark(closes, after=frozenset({Previous.CALL}), opens=opens),
    )


@dataclass(frozen=True, slots=True)
class OutputMarkup:
    """How a model marks its thoughts and its calls."""

    regions: tuple[TextRegion, ...] = ()
    sections: tuple[SectionMark, ...] = ()
    inner: tuple[str, ...] = ()
    """Marks within bodies, for those who read them."""

    @property
    def marks(self) -> frozenset[str]:
        """All that it is told by."""
        return frozenset(
            mark
            for region in self.regions
            for mark in (*region.opens, *region.closes, *region.until, region.head)
            if mark
        ).union((section.text for section in self.sections), self.inner)

    def __or__(self, other: "OutputMarkup") -> "OutputMarkup":
        return OutputMarkup(
            tuple(dict.fromkeys(self.regions + other.regions)),
            tuple(dict.fromkeys(self.sections + other.sections)),
            tuple(dict.fromkeys(self.inner + other.inner)),
        )
