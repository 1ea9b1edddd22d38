"""State of a region (reasoning, tool calls or content) that has begun in an answer.

No I/O, clock or threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.api.tools.parsing.constrained_parser import ConstrainedCallParser
from baton.api.tools.parsing.json_scanner import JsonScanner, is_json
from baton.api.tools.parsing.mark_search import cut_off_at
from baton.api.tools.parsing.output_markup import (
    JSON_SYNTAX,
    CallSyntax,
    OutputMarkup,
    ParsedCalls,
    PrefixMatch,
    RegionKind,
    TextRegion,
)
from baton.api.tools.parsing.output_parts import (
    CompleteToolCall,
    MalformedToolCall,
    OutputPart,
    ToolCallDelta,
    ToolCallStart,
    ToolSchemas,
)

LAYOUT_MAX: Final = 256
"""Most characters of whitespace between an opening mark (such as `<tool_call>`) and its tool call."""


@dataclass(slots=True)
class OpenRegion:
    """State of a region (reasoning, tool calls or content) that has begun in an answer and has not ended."""

    region: TextRegion
    kind: RegionKind
    mark: str
    head: list[str] = field(default_factory=list)
    in_head: bool = False
    body: list[str] = field(default_factory=list)
    call: ConstrainedCallParser | None = None
    """Parser of a tool call that a grammar constrains, while the model is writing it. Else None."""
    is_emitted: bool = field(default=False, init=False)
    """Whether the tool call, or its start if it is streamed, was already returned as a part of the answer."""
    arguments: list[str] = field(default_factory=list)
    """Pieces of the JSON arguments of a tool call that a grammar constrains, in order. They are returned when
    the call is complete, or as they come."""
    syntax: CallSyntax | None = None
    """Syntax in which the region's tool calls are written. None until enough of their text has come."""
    json: JsonScanner | None = None
    """Scanner that tells which marks in the region's body are within JSON strings. None if the body is not
    JSON."""
    could_end: bool = field(default=False, init=False)
    """Whether the region's body has a closing mark. The tool call may end there, or the mark may be text of
    an argument."""
    next_attempt: int = field(default=0, init=False)
    """Size of the region's body, in characters, at which the next attempt to parse its tool calls is made."""
    size: int = field(default=0, init=False)
    """Number of characters of the region's body, if it holds tool calls that are not JSON. Not counted
    otherwise."""

    @property
    def header(self) -> str:
        """Text of the region's opening mark and of the message header after it."""
        return self.mark + "".join(self.head)

    @property
    def has_to_be_parsed_again(self) -> bool:
        """Whether the region's body was parsed wrongly, as the end of the answer shows: a constrained call or
        a JSON value is incomplete."""
        is_cut_off = self.call is not None and not self.is_emitted
        return is_cut_off or (self.json is not None and self.json.is_open)

    def take(self, text: str) -> bool:
        """Add text to the region's message header, or to its body if it holds tool calls. Return False for
        text of reasoning or content, which the region does not collect."""
        if self.in_head:
            self.head.append(text)
        elif self.kind is RegionKind.CALLS:
            self.body.append(text)
            self.size += len(text)
        return self.in_head or self.kind is RegionKind.CALLS

    def clear_body(self) -> str:
        """Empty the body of the region, and return the text that it had."""
        body = "".join(self.body)
        self.body.clear()
        return body

    def call_named_by_head(self, schemas: ToolSchemas) -> ConstrainedCallParser | None:
        """Return the parser of a tool call that a grammar constrains, if the region's message header names
        the tool. Otherwise return None."""
        try:
            (call,) = self.region.read(self.header, "{}", schemas)
        except MalformedToolCall:
            return None
        return ConstrainedCallParser({"": call.name}, "")

    def grow(
        self, call: ConstrainedCallParser, text: str, *, streams: bool
    ) -> tuple[int, Sequence[OutputPart]]:
        """Parse text of a tool call that a grammar constrains. Return the number of its characters, and the
        parts of the answer in it.

        `streams`: whether the tool call is returned as it grows, and not when it is complete.
        """
        parts: list[OutputPart] = []
        has_begun = call.name is not None
        taken, arguments = call.take(text)
        self.body.append(text[:taken])
        if call.has_failed:
            return taken, parts
        if streams and call.name is not None and not has_begun:
            self.is_emitted = True
            parts.append(ToolCallStart(call.name))
        if arguments and streams:
            parts.append(ToolCallDelta(arguments))
        self.arguments.append(arguments)
        if call.arguments_end and not self.is_emitted:
            written = "".join(self.arguments)
            call.has_failed = call.name is None or not is_json(written)
            if call.name is not None and not call.has_failed:
                self.is_emitted = True
                parts.append(CompleteToolCall(call.name, written))
        return taken, parts

    def parse_ahead(self, schemas: ToolSchemas, *, final: bool) -> tuple[str, ParsedCalls | None]:
        """Parse the tool calls in the region's body, if their syntax is not JSON. Return the body's text, and
        the tool calls or None.

        `final`: whether the answer or the region has ended. A closing mark that is cut off at the end is then
        left out of the text.
        """
        text = "".join(self.body)
        parse = None if self.syntax is None else self.syntax.parse_ahead
        if parse is None:
            return text, None
        found = parse(text, schemas, final)
        if found is None and final:
            end = cut_off_at(text, self.region.closes)
            if end < len(text) and (found := parse(text[:end], schemas, True)) is not None:
                return text[:end], found
        return text, found


def choose_syntax(
    region: TextRegion, text: str, schemas: ToolSchemas, *, last: bool
) -> CallSyntax | PrefixMatch:
    """Return the syntax in which the tool calls of a region are written, from how their text begins.

    Returns `PrefixMatch.NO` if no syntax fits, and `PrefixMatch.PARTIAL` if more text is needed to decide.
    `text`: text after the opening mark. `last`: whether the answer ends with it.
    """
    started = text.lstrip()
    layout = len(text) - len(started)
    if not started and layout <= LAYOUT_MAX:
        return JSON_SYNTAX if last else PrefixMatch.PARTIAL
    syntaxes = region.syntaxes if layout <= LAYOUT_MAX else ()
    found = [(each, each.begins(started, schemas)) for each in syntaxes]
    fits = [each for each, begins in found if begins is PrefixMatch.YES]
    partial = [each for each, begins in found if begins is PrefixMatch.PARTIAL]
    if not fits and partial and not last:
        return PrefixMatch.PARTIAL
    chosen = fits or partial
    return chosen[0] if chosen else PrefixMatch.NO


def head_counts(markup: OutputMarkup, mark: str, text: str, *, last: bool) -> PrefixMatch:
    """Return whether the mark at the beginning of a text is a real mark, or plain text.

    Some formats have marks such as `<|start|>` before a message header. They are real only if a header
    follows.
    """
    for region in markup.regions:
        if mark in region.opens and region.head_begins is not None:
            return region.head_begins(text[len(mark) :], last)
    return PrefixMatch.YES
