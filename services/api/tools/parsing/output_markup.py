"""Regions of a model's answer (reasoning, tool calls, content), and the marks around them.

A mark is a text that a model writes around a region of its answer, such as `<tool_call>`. It is one special
token of some tokenizers, and several tokens of others.

No I/O, clock or threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from baton.api.tools.parsing.output_parts import CompleteToolCall, MalformedToolCall, ToolSchemas


class RegionKind(Enum):
    """Kind of a region of an answer: reasoning, tool calls or content."""

    REASONING = "thought"
    CALLS = "calls"
    CONTENT = "said"


Read = Callable[[str, str, ToolSchemas], Sequence[CompleteToolCall]]
"""Function that returns the tool calls in a region's head and body, given the tools' schemas. Raises
MalformedToolCall."""


class ParsedCalls(NamedTuple):
    """Result of parsing tool calls at the beginning of a text: the calls, and where they end."""

    calls: Sequence[CompleteToolCall]
    end: int
    """Index in the text of the first character after the tool calls."""


class PrefixMatch(Enum):
    """Result of testing whether a text begins as a tool call or a message header does."""

    NO = "no"
    PARTIAL = "perhaps"
    """The text is too short to decide whether it begins as a tool call or a message header."""
    YES = "yes"


def _any_begins(_: str, __: ToolSchemas) -> PrefixMatch:
    return PrefixMatch.YES


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax in which tool calls are written after their opening mark."""

    begins: Callable[[str, ToolSchemas], PrefixMatch] = _any_begins
    """Function that tests whether a text, without leading whitespace, begins in this syntax of tool calls."""
    parse_ahead: Callable[[str, ToolSchemas, bool], ParsedCalls | None] | None = None
    """Parser of tool calls that are not JSON, whose arguments may contain marks such as `</tool_call>`. It
    takes the text, the tools' schemas, and whether the text is all of the answer. None for JSON, in whose
    strings marks are plain text."""


JSON_SYNTAX = CallSyntax()


def _no_calls(_: str, body: str, __: ToolSchemas) -> Sequence[CompleteToolCall]:
    raise MalformedToolCall(body)


@dataclass(frozen=True, slots=True)
class TextRegion:
    """Definition of one kind of region in a format: its kind, its marks, and the parser of its tool calls."""

    kind: RegionKind
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    """Marks (such as `</think>`) that end this region of an answer and belong to it. Empty if the region
    lasts to the end of the answer."""
    until: tuple[str, ...] = ()
    """Marks (such as `<tool_call>`) that end this region of an answer. Unlike `closes`, they are then parsed
    as the start of the next region."""
    head: str = ""
    """Mark that ends a message header, which comes before the region's body in some formats. Empty if the
    format has no message headers."""
    head_begins: Callable[[str, bool], PrefixMatch] | None = None
    """Function that tests whether the text after the opening mark begins as a head (a message header) does.
    If it does not, the mark is plain text. Arguments are the text, and whether it is all of the answer."""
    classify: Callable[[str], RegionKind] | None = None
    """Function that returns whether a region is reasoning, a tool call or content, given its message header.
    None for formats in which the opening mark decides."""
    bare: bool = False
    """Whether the opening mark, such as `{`, belongs to the region's body, and opens a region only at the
    beginning of an answer."""
    in_body: bool = False
    """Whether the opening mark, such as `<function=`, belongs to the region's body. It opens a region
    anywhere in an answer."""
    read: Read = _no_calls
    syntaxes: tuple[CallSyntax, ...] = (JSON_SYNTAX,)


class Previous(Enum):
    """Kind of the answer part directly before a mark (such as `<tool_call>`). Whitespace between them does
    not count."""

    START = "start"
    """Only whitespace is before the mark, so that the mark is at the beginning of the answer."""
    REASONING = "reasoning"
    CALL = "call"
    CONTENT = "content"


class SectionMark(NamedTuple):
    """Mark around all tool calls or all content of an answer. It is dropped there. Elsewhere it is text."""

    text: str
    after: frozenset[Previous] = frozenset()
    """Kinds of answer parts. Directly after one of these kinds, this mark around a section is dropped."""
    before_calls: bool = False
    """Whether this mark around a section is dropped directly before a tool call."""
    at_end: bool = False
    """Whether this mark around a section is dropped at the end of an answer."""
    opens: str = ""
    """Opening mark of the section that this mark closes, or "". Both are dropped if nothing is between them.
    """


def section_marks(opens: str, closes: str) -> tuple[SectionMark, ...]:
    """Return the two marks around a section of tool calls, from their opening and closing texts."""
    return (
        SectionMark(opens, before_calls=True),
        SectionMark(closes, after=frozenset({Previous.CALL}), opens=opens),
    )


@dataclass(frozen=True, slots=True)
class OutputMarkup:
    """Marks (such as `<think>` and `<tool_call>`) of one model's output formats, by region of the answer."""

    regions: tuple[TextRegion, ...] = ()
    sections: tuple[SectionMark, ...] = ()
    inner: tuple[str, ...] = ()
    """Marks within the bodies of regions, such as the one between a tool's name and its arguments. Only the
    parsers of tool calls read them."""

    @property
    def of_calls(self) -> "OutputMarkup":
        """The same markup with only the regions of tool calls."""
        calls = tuple(region for region in self.regions if region.kind is RegionKind.CALLS)
        return OutputMarkup(calls, self.sections, self.inner)

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Opening marks of tool calls, such as `<tool_call>`, that open a call anywhere in an answer."""
        return tuple(mark for region in self.of_calls.regions if not region.bare for mark in region.opens)

    @property
    def may_have_calls(self) -> bool:
        return bool(self.of_calls.regions) or any(region.classify for region in self.regions)

    @property
    def marks(self) -> frozenset[str]:
        """All marks of the format, such as `<think>` and `</tool_call>`."""
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
