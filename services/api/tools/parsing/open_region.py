"""A region of an answer that has begun.

Pure.
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
"""Most whitespace between a mark and its call."""


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

    @property
    def header(self) -> str:
        """The opening mark and the head."""
        return self.mark + "".join(self.head)

    @property
    def has_to_be_parsed_again(self) -> bool:
        """Whether the answer's end shows that the body was taken for something else."""
        is_cut_off = self.call is not None and not self.is_emitted
        return is_cut_off or (self.json is not None and self.json.is_open)

    def take(self, text: str) -> bool:
        """Add text to the head, or to the body of calls. Returns False if it is content or reasoning."""
        if self.in_head:
            self.head.append(text)
        elif self.kind is RegionKind.CALLS:
            self.body.append(text)
            self.size += len(text)
        return self.in_head or self.kind is RegionKind.CALLS

    def clear_body(self) -> str:
        """Remove the body and return it."""
        body = "".join(self.body)
        self.body.clear()
        return body

    def call_named_by_head(self, schemas: ToolSchemas) -> ConstrainedCallParser | None:
        """Return the parser of a call whose name stands in the head."""
        try:
            (call,) = self.region.read(self.header, "{}", schemas)
        except MalformedToolCall:
            return None
        return ConstrainedCallParser({"": call.name}, "")

    def grow(
        self, call: ConstrainedCallParser, text: str, *, streams: bool
    ) -> tuple[int, Sequence[OutputPart]]:
        """Take text of a constrained call. Returns the number of its characters, and the parts in it.

        `streams`: the call is returned as it grows, and not when it is complete.
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
        """Parse the calls of a body that is no JSON. Returns the body and its calls, or None.

        `final`: the calls have ended. A closing mark may be cut off then, and is no part of the body.
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
    """Return the syntax in which calls begin, NO if there is none, or PARTIAL if more text has to decide.

    `text`: text behind the opening mark. `last`: it is all of the answer.
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
    """Return whether the mark at the beginning of a text counts.

    The mark of a head needs a head behind it.
    """
    for region in markup.regions:
        if mark in region.opens and region.head_begins is not None:
            return region.head_begins(text[len(mark) :], last)
    return PrefixMatch.YES
