"""Regions of a model's answer, and the marks between which they stand.

A mark is a text that a model writes around a part of its answer, such as `<tool_call>`. It is a special token
of some tokenizers, and several tokens of others.

Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from baton.api.tools.parsing.output_parts import CompleteToolCall, MalformedToolCall, ToolSchemas


class RegionKind(Enum):
    """Kind of the text between two marks."""

    REASONING = "thought"
    CALLS = "calls"
    CONTENT = "said"


Read = Callable[[str, str, ToolSchemas], Sequence[CompleteToolCall]]
"""Returns the calls of a head and a body, given the tools' schemas. Raises MalformedToolCall."""


class ParsedCalls(NamedTuple):
    """Calls at the beginning of a text, behind which it may go on."""

    calls: Sequence[CompleteToolCall]
    end: int
    """Index of the text behind the calls."""


class PrefixMatch(Enum):
    """Whether a text begins as a call or a head does."""

    NO = "no"
    PARTIAL = "perhaps"
    """The text is too short to decide."""
    YES = "yes"


def _any_begins(_: str, __: ToolSchemas) -> PrefixMatch:
    return PrefixMatch.YES


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax in which calls are written behind their mark."""

    begins: Callable[[str, ToolSchemas], PrefixMatch] = _any_begins
    """Whether a text without leading whitespace begins in this syntax."""
    parse_ahead: Callable[[str, ToolSchemas, bool], ParsedCalls | None] | None = None
    """Parser of calls that are no JSON, in a text that may hold marks which are arguments. Takes the text,
    the tools' schemas, and whether the text is all of the answer. None for JSON, in whose strings marks
    are text."""


JSON_SYNTAX = CallSyntax()


def _no_calls(_: str, body: str, __: ToolSchemas) -> Sequence[CompleteToolCall]:
    raise MalformedToolCall(body)


@dataclass(frozen=True, slots=True)
class TextRegion:
    """A part of an answer between marks, as a format describes it."""

    kind: RegionKind
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    """Marks that end the region and belong to it. Empty if the region lasts to the end of the answer."""
    until: tuple[str, ...] = ()
    """Marks that end the region and belong to what follows."""
    head: str = ""
    """Mark that ends the head before the body. Empty if the region has no head."""
    head_begins: Callable[[str, bool], PrefixMatch] | None = None
    """Whether a text behind the opening mark begins as a head does. If not, the mark is text. Takes the text,
    and whether it is all of the answer."""
    classify: Callable[[str], RegionKind] | None = None
    """Kind of the region by its head, for formats in which the head decides."""
    bare: bool = False
    """The opening mark is part of the body, and counts only at the beginning of an answer."""
    in_body: bool = False
    """The opening mark is part of the body, and counts everywhere."""
    read: Read = _no_calls
    syntaxes: tuple[CallSyntax, ...] = (JSON_SYNTAX,)


class Previous(Enum):
    """Part of an answer directly before a mark, apart from whitespace."""

    START = "start"
    """The answer begins there."""
    REASONING = "reasoning"
    CALL = "call"
    CONTENT = "content"


class SectionMark(NamedTuple):
    """A mark around all calls or around all content. It is dropped there, and is content elsewhere."""

    text: str
    after: frozenset[Previous] = frozenset()
    """Parts of an answer directly behind which the mark is dropped."""
    before_calls: bool = False
    """The mark is dropped directly before a call."""
    at_end: bool = False
    """The mark is dropped at the end of an answer."""
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
    """Marks of a model's reasoning and calls, by region."""

    regions: tuple[TextRegion, ...] = ()
    sections: tuple[SectionMark, ...] = ()
    inner: tuple[str, ...] = ()
    """Marks within bodies, which the parsers of the calls read."""

    @property
    def of_calls(self) -> "OutputMarkup":
        """The same markup without regions of reasoning and content."""
        calls = tuple(region for region in self.regions if region.kind is RegionKind.CALLS)
        return OutputMarkup(calls, self.sections, self.inner)

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Opening marks of calls, without those that count only at the beginning of an answer."""
        return tuple(mark for region in self.of_calls.regions if not region.bare for mark in region.opens)

    @property
    def may_have_calls(self) -> bool:
        return bool(self.of_calls.regions) or any(region.classify for region in self.regions)

    @property
    def marks(self) -> frozenset[str]:
        """All marks of the format."""
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
