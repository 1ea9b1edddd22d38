"""Parser that splits a model's text into content, reasoning and tool calls.

A model writes all of them into one text, between marks of its own (`formats.output_formats`). The parts do
not depend on how that text was cut into pieces. A tool call is returned once it is complete and can be
parsed, so that no part of it is ever wrong. A text that cannot be parsed as a tool call is content. A tool
call that a grammar constrains may be returned as it grows. It can be cut off, but not malformed.

A mark counts only in positions where it makes sense. Reasoning comes at the beginning of an answer. A tool
call begins after its mark in a syntax of its format. It ends where its JSON ends, or at the last mark that
can end it. No I/O, clock or threads.
"""

from itertools import chain
from typing import Final

from baton.api.tools.parsing.call_in_reasoning import IN_REASONING_MAX, CallInReasoning
from baton.api.tools.parsing.constrained_parser import CallLayout, ConstrainedCallParser
from baton.api.tools.parsing.json_scanner import JsonScanner
from baton.api.tools.parsing.mark_search import first_mark
from baton.api.tools.parsing.open_region import OpenRegion, choose_syntax, head_counts
from baton.api.tools.parsing.output_markup import (
    JSON_SYNTAX,
    CallSyntax,
    OutputMarkup,
    PrefixMatch,
    RegionKind,
)
from baton.api.tools.parsing.output_parts import (
    MalformedToolCall,
    OutputPart,
    ToolCallDelta,
    ToolSchemas,
    merge_parts,
)
from baton.api.tools.parsing.part_writer import PartWriter
from baton.api.tools.parsing.text_after_calls import NextCalls, parse_calls
from baton.api.tools.parsing.unread_text import UnreadText

READ_CHARS_MAX: Final = 2**19
"""Most characters of one answer that are parsed as tool calls without success. Beyond them, a tool call ends
where the next one begins."""


class OutputParser:
    """Parser that splits one answer into its parts, by the marks of the model's formats."""

    def __init__(
        self,
        markup: OutputMarkup,
        schemas: ToolSchemas,
        *,
        thinking: bool = False,
        layout: CallLayout | None = None,
        streams_calls: bool = False,
        constrained: bool = False,
        calls_alone: bool = False,
    ) -> None:
        """Start to parse an answer.

        `markup`: marks of the model's formats.
        `schemas`: schemas of the tools that may be called.
        `thinking`: whether the prompt has already opened the reasoning.
        `layout`: layout of the tool calls that a grammar constrains. None if no grammar does.
        `streams_calls`: whether constrained tool calls are returned as they grow.
        `constrained`: whether a grammar constrains the content, so that content has no marks.
        `calls_alone`: whether parsing ends after the first content.
        """
        self._markup = markup
        self._layout = layout
        self._streams_calls = streams_calls
        self._constrained = constrained
        self._calls_alone = calls_alone
        self._schemas = schemas
        self._call_marks = markup.call_marks
        self._text = UnreadText()
        self._writer = PartWriter(markup.sections, calls_come=markup.may_have_calls)
        self._open: OpenRegion | None = None
        self._inner: CallInReasoning | None = None
        self._not_calls = 0
        self._chars_left = READ_CHARS_MAX
        self._next_calls = NextCalls(self._call_marks)
        self.malformed_calls = 0
        reasoning = [each for each in markup.regions if each.kind is RegionKind.REASONING]
        if thinking and reasoning:
            self._open = OpenRegion(reasoning[0], RegionKind.REASONING, "")
            self._writer.begin_reasoning()

    @property
    def thinking(self) -> bool:
        return self._open is not None and self._open.kind is RegionKind.REASONING

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends within a JSON string of a tool call, where a mark is plain text."""
        return self._open is not None and self._open.json is not None and self._open.json.in_string

    @property
    def _is_over(self) -> bool:
        return self._calls_alone and (self._writer.has_content or self.malformed_calls > 0)

    def push(self, text: str) -> list[OutputPart]:
        self._text.append(text)
        self._advance(last=False)
        return merge_parts(self._writer.take_parts())

    def flush(self) -> list[OutputPart]:
        self._advance(last=True)
        while self._open is not None and not self._is_over:
            self._finish(self._open)
            self._advance(last=True)
        self._writer.finish()
        return merge_parts(self._writer.take_parts())

    def _advance(self, *, last: bool) -> None:
        """Parse all text that has arrived, a bounded piece at a time. `last`: the answer has ended."""
        while not self._is_over and (self._text.head or self._text.lengthen()):
            if not self._step(last=last and self._text.is_short) and not self._text.lengthen():
                break

    def _step(self, *, last: bool) -> bool:
        """Parse the next mark, or the text before it. Return False if more text has to decide."""
        if self._open is None and self._opens_bare(last=last):
            return False
        now = self._open
        if now is not None and self._inner is not None:
            return self._advance_inner(now, self._inner, last=last)
        if now is not None and now.call is not None:
            self._grow(now, now.call)
            return True
        if now is not None and now.kind is RegionKind.CALLS and not now.in_head and now.syntax is None:
            return self._choose_syntax(now, last=last)
        start, mark = first_mark(self._text.head, self._marks(), last=last)
        if now is not None and now.json is not None and not self._take_json(now, now.json, start):
            return True
        self._pass(self._text.take(start))
        if start and mark is not None:
            return True  # after this text other marks count
        return mark is not None and self._meet_or_pass(mark, last=last)

    def _opens_bare(self, *, last: bool) -> bool:
        """Open a region whose mark, such as `{`, begins the answer. Return True to wait for more text."""
        if self._writer.begun:
            return False
        bare = [each for each in self._markup.regions if each.bare]
        if not bare:
            return False
        text = (self._writer.gap + self._text.head).lstrip()
        if not text:
            return not last
        for region in bare:
            if text.startswith(region.opens):
                self._writer.begin_bare()
                self._text.take(len(self._text.head) - len(self._text.head.lstrip()))
                call = None if region.head else self._constrained_call("")
                self._open = OpenRegion(region, region.kind, "", in_head=bool(region.head), call=call)
                return False
        return not last and any(mark.startswith(text) for region in bare for mark in region.opens)

    def _marks(self) -> tuple[str, ...]:
        """Return the marks (such as `</think>`) that count at the present position. Others are text."""
        now = self._open
        if now is not None and now.in_head:
            return (now.region.head,)
        if self._constrained and (self._writer.begun if now is None else now.kind is RegionKind.CONTENT):
            return ()
        if now is None:
            may_reason = not self._writer.begun and not self._writer.reasoned
            regions = (each for each in self._markup.regions if not each.bare)
            opens = (each.opens for each in regions if may_reason or each.kind is not RegionKind.REASONING)
            return (*chain.from_iterable(opens), *(section.text for section in self._markup.sections))
        ends = (*now.region.closes, *now.region.until)
        if now.kind is RegionKind.REASONING and not now.region.head:
            again = now.region.opens if self._writer.is_fresh else ()
            no_calls = self._layout is not None or self._constrained or self._not_calls >= IN_REASONING_MAX
            return (*ends, *again, *(() if no_calls else self._call_marks))
        if now.syntax is not None and now.syntax.parse_ahead is not None:
            return (*ends, *self._call_marks)
        return ends

    def _meet_or_pass(self, mark: str, *, last: bool) -> bool:
        """Decide whether the next mark is plain text, and act on it. Return False to wait for more text."""
        now = self._open
        counts = PrefixMatch.YES
        if now is None or (now.kind is not RegionKind.CALLS and mark in now.region.until):
            counts = head_counts(self._markup, mark, self._text.head, last=last)
        if counts is PrefixMatch.YES:
            self._meet(mark)
        elif counts is PrefixMatch.NO:
            self._pass(self._text.take(len(mark)))
        return counts is not PrefixMatch.PARTIAL

    def _meet(self, mark: str) -> None:
        """Act on a mark (such as `<think>`): it opens or closes a region, or ends a message header."""
        now = self._open
        if now is None:
            if self._writer.write_section_mark(mark):
                self._text.take(len(mark))
            else:
                self._open_region(mark)
        elif now.in_head:
            self._end_head(now, mark)
        elif now.syntax is not None and now.syntax.parse_ahead is not None:
            self._meet_in_call(now, mark)
        elif mark in now.region.closes:
            self._text.take(len(mark))
            self._close(mark)
        elif mark in now.region.until:
            self._close("")
        elif mark in now.region.opens:
            self._text.take(len(mark))  # reasoning that is opened again
        else:
            parser = OutputParser(self._markup.of_calls, self._schemas, calls_alone=True)
            self._inner = CallInReasoning(mark, parser)

    def _open_region(self, mark: str) -> None:
        for region in self._markup.regions:
            if not region.bare and mark in region.opens:
                call = self._constrained_call(mark) if region.kind is RegionKind.CALLS else None
                self._open = OpenRegion(region, region.kind, mark, in_head=bool(region.head), call=call)
                if region.kind is RegionKind.REASONING:
                    self._writer.begin_reasoning()
                if region.in_body:
                    return
                break
        self._text.take(len(mark))

    def _end_head(self, now: OpenRegion, mark: str) -> None:
        self._text.take(len(mark))
        now.in_head = False
        if now.region.classify is not None:
            now.kind = now.region.classify(now.header)
        if now.kind is RegionKind.REASONING:
            self._writer.begin_reasoning()
        if now.kind is RegionKind.CALLS and self._layout is not None and self._layout.mark == mark:
            now.call = now.call_named_by_head(self._schemas)

    def _constrained_call(self, mark: str) -> ConstrainedCallParser | None:
        layout = self._layout
        return layout.parser(self._schemas) if layout is not None and layout.mark == mark else None

    def _grow(self, now: OpenRegion, call: ConstrainedCallParser) -> None:
        """Parse more text of a tool call that a grammar constrains."""
        taken, parts = now.grow(call, self._text.head, streams=self._streams_calls)
        self._text.take(taken)
        for part in parts:
            if isinstance(part, ToolCallDelta):
                self._writer.write_more_arguments(part)
            else:
                self._writer.write_calls(part)
        if call.has_failed:
            self._parse_again(now)
        elif now.region.closes and call.arguments_end:
            now.call, now.syntax = None, JSON_SYNTAX
        elif call.ends:
            self._open = None
            self._writer.end_call()

    def _parse_again(self, now: OpenRegion) -> None:
        """Put back the region's body: it does not fit the grammar's layout, or its JSON is broken."""
        self._text.prepend(now.clear_body())
        now.call = now.json = None

    def _choose_syntax(self, now: OpenRegion, *, last: bool) -> bool:
        """Choose the syntax of the tool calls after their opening mark. If none fits, the mark is content.

        Returns False if more text is needed to decide.
        """
        chosen = choose_syntax(now.region, self._text.head, self._schemas, last=last)
        if chosen is PrefixMatch.NO:
            self._open = None
            if now.region.in_body:
                self._text.take(len(now.mark))
            self._writer.write_content(now.mark)
        elif isinstance(chosen, CallSyntax):
            now.syntax = chosen
            now.json = JsonScanner() if chosen.parse_ahead is None and self._text.head.strip() else None
        return chosen is not PrefixMatch.PARTIAL

    def _take_json(self, now: OpenRegion, json: JsonScanner, start: int) -> bool:
        """Move text of a JSON tool call into the region's body, up to a possible mark at index `start`.

        Returns whether the mark counts: not within a JSON string, and not after broken JSON.
        """
        if json.in_string:
            now.body.append(self._text.take(json.take_string(self._text.head)))
            return False
        taken = json.take_plain(self._text.head[:start])
        if json.broken:
            self._parse_again(now)
        elif json.in_string:
            now.body.append(self._text.take(taken))
        return not json.broken and not json.in_string

    def _meet_in_call(self, now: OpenRegion, mark: str) -> None:
        """Act on a mark in a tool call that is not JSON: it ends the call, opens another, or is text."""
        if now.could_end and mark in self._call_marks:
            if self._chars_left <= 0:
                self._parse_ahead(now, final=True)
                return
            if now.size >= now.next_attempt:
                if self._parse_ahead(now, final=False):
                    return
                now.next_attempt = 2 * now.size
        now.could_end = now.could_end or mark in now.region.closes
        self._pass(self._text.take(len(mark)))

    def _parse_ahead(self, now: OpenRegion, *, final: bool) -> bool:
        """Parse the tool calls in a region's body. Return False if they may not have ended yet.

        `final`: whether they have ended. A body without a tool call is then content, up to its first closing
        mark.
        """
        text, found = now.parse_ahead(self._schemas, final=final)
        if found is None and not final:
            return False
        self._open = None
        if found is not None:
            self._writer.write_calls(*found.calls)
            self._text.prepend(text[found.end :])
            return True
        self._chars_left -= len(text)
        self.malformed_calls += 1
        start, mark = first_mark(text, now.region.closes, last=True)
        end = start + len(mark or "")
        self._writer.write_content(("" if now.region.in_body else now.mark) + text[:end])
        self._text.prepend(text[end:])
        return True

    def _advance_inner(self, now: OpenRegion, inner: CallInReasoning, *, last: bool) -> bool:
        """Parse more text of a possible tool call within reasoning. Return False if more text is needed."""
        start, mark = first_mark(self._text.head, now.region.closes, last=last)
        inner.push(self._text.take(start))
        if mark is not None and not inner.failed and inner.parser.in_string:
            inner.push(self._text.take(len(mark)))
        elif mark is not None or inner.failed:
            self._resume(inner)
        else:
            return False
        return True

    def _resume(self, inner: CallInReasoning) -> None:
        """Continue the reasoning, because the possible tool call in it turned out to be text."""
        self._inner = None
        self._not_calls += 1
        self._writer.write_reasoning(inner.mark)
        self._text.prepend("".join(inner.text)[len(inner.mark) :])

    def _finish(self, now: OpenRegion) -> None:
        """Close the open region at the end of the answer. If its text was parsed wrongly, it is
        parsed again."""
        inner = self._inner
        if inner is not None:
            inner.flush()
            if inner.failed or not inner.parts:
                self._not_calls += IN_REASONING_MAX // 2
                self._resume(inner)
                return
            self._inner = None
            self._close("")
            self._writer.write_calls(*inner.parts)
        elif now.has_to_be_parsed_again:
            self._parse_again(now)
        elif now.syntax is not None and now.syntax.parse_ahead is not None:
            self._parse_ahead(now, final=True)
        else:
            self._close("")

    def _pass(self, text: str) -> None:
        """Add text without a mark to the open region, or write it as reasoning or content."""
        now = self._open
        if not text or (now is not None and now.take(text)):
            return
        if now is not None and now.kind is RegionKind.REASONING:
            self._writer.write_reasoning(text)
        else:
            self._writer.write_content(text)

    def _close(self, mark: str) -> None:
        """Close the open region of the answer. `mark`: the closing mark, or "" if the answer ended or another
        region began."""
        now = self._open
        assert now is not None
        self._open = None
        if now.in_head:
            return  # a head without a body is no part
        if now.kind is RegionKind.REASONING:
            self._writer.end_reasoning()
        if now.kind is not RegionKind.CALLS or now.is_emitted:
            return
        head, body = now.header, "".join(now.body)
        if not (mark or now.head or body.strip() or self._writer.is_in_sentence):
            return  # the answer was cut off before a call
        try:
            calls, rest = parse_calls(now.region, head, body, self._schemas, self._next_calls)
        except MalformedToolCall:
            self.malformed_calls += 1
            self._writer.write_content(head + now.region.head + body + mark)
            return
        self._writer.write_calls(*calls)
        self._text.prepend(self._next_calls.reparse(rest, mark))
