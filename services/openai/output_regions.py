"""Regions of a model's answer, and the marks between which they stand.

Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from baton.openai.output_parts import Call, Schemas, Unreadable


class RegionKind(Enum):
    """What stands between two marks."""

    THOUGHT = "thought"
    CALLS = "calls"
    SAID = "said"


Read = Callable[[str, str, Schemas], Sequence[Call]]
"""The calls in a body, behind its head. Raises Unreadable."""


class ReadAhead(NamedTuple):
    """Calls at the beginning of a text that may go on."""

    calls: Sequence[Call]
    end: int
    """Where the text goes on behind them."""


class CallStart(Enum):
    """Whether a text begins as a call does."""

    NO = "no"
    PERHAPS = "perhaps"
    """It is too short to know."""
    YES = "yes"


def _any_begins(_: str, __: Schemas) -> CallStart:
    return CallStart.YES


@dataclass(frozen=True, slots=True)
class CallBody:
    """One way in which calls are written behind their mark."""

    begins: Callable[[str, Schemas], CallStart] = _any_begins
    """Whether a text, which has no whitespace before it, begins so."""
    read_ahead: Callable[[str, Schemas, bool], ReadAhead | None] | None = None
    """Reads the calls of a text that holds marks which are text, where it is not JSON. The flag: nothing
    follows the text. None: JSON, in whose strings marks are text."""


JSON_BODY = CallBody()


def _no_calls(_: str, body: str, __: Schemas) -> Sequence[Call]:
    raise Unreadable(body)


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
    head_begins: Callable[[str, bool], CallStart] | None = None
    """Whether a text behind the region's mark begins as its head does; else the mark is text. The flag:
    nothing follows the text."""
    sort: Callable[[str], RegionKind] | None = None
    """What a head makes of it."""
    bare: bool = False
    """Its mark is part of its body, and counts where nothing was said before it alone."""
    in_body: bool = False
    """Its mark is part of its body, and counts everywhere."""
    read: Read = _no_calls
    bodies: tuple[CallBody, ...] = (JSON_BODY,)


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
class Dialect:
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

    def __or__(self, other: "Dialect") -> "Dialect":
        return Dialect(
            tuple(dict.fromkeys(self.regions + other.regions)),
            tuple(dict.fromkeys(self.sections + other.sections)),
            tuple(dict.fromkeys(self.inner + other.inner)),
        )
