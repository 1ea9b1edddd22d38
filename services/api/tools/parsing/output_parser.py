"""Which of a model's text is its answer, which a thought, and which the call of a tool?

A model writes all of it into one text, between marks of its own (`dialects`). This is a fold over that text:
how it was cut into pieces changes nothing. A call is told when it is whole and can be read, so that what is
told of it is never broken; one that cannot be read stays the text that it was. One that a grammar holds is
told as it grows, where that is asked for: it cannot be broken, but cut off.

A mark counts only where it can stand. Reasoning stands at an answer's beginning. A call begins as its format
says behind its mark, and ends where its JSON ends, or at its last possible mark. Elsewhere a mark is text.

Pure.
"""

from itertools import chain
from typing import Final

from baton.api.tools.parsing.call_in_reasoning import CallInReasoning
from baton.api.tools.parsing.constrained_parser import CallLayout, ConstrainedCallParser
from baton.api.tools.parsing.json_scanner import JsonScanner, is_json
from baton.api.tools.parsing.open_region import OpenRegion, first_mark, head_counts
from baton.api.tools.parsing.output_markup import JSON_SYNTAX, OutputMarkup, PrefixMatch, RegionKind
from baton.api.tools.parsing.output_parts import (
    CompleteToolCall,
    MalformedToolCall,
    OutputPart,
    ToolCallDelta,
    ToolCallStart,
    ToolSchemas,
    merge_parts,
)
from baton.api.tools.parsing.part_writer import PartWriter
from baton.api.tools.parsing.text_after_calls import NextCalls, cut_off_at, read_calls
from baton.api.tools.parsing.unread_text import UnreadText

IN_REASONING_MAX: Final = 8
"""Most marks of calls in reasoning that turn out to be text. Those behind them are."""
READ_CHARS_MAX: Final = 2**19
"""Most characters of one answer that are read as calls and are none. Behind them the next call's mark ends a
call."""
LAYOUT_MAX: Final = 256
"""Most whitespace between a mark and its call."""


class OutputParser:
    """One answer in a dialect. Whitespace around thoughts and calls is layout, and belongs to nothing."""

    def __init__(
        self,
        dialect: OutputMarkup,
        schemas: ToolSchemas,
        *,
        thinking: bool = False,
        held: CallLayout | None = None,
        grows: bool = False,
        constrained: bool = False,
        calls_alone: bool = False,
    ) -> None:
        """`thinking`: the prompt has opened a thought already. `held`: as what a grammar has calls written.
        `grows`: those are told as they come. `constrained`: a grammar has the content, which has no marks.
        `calls_alone`: nothing is read behind content."""
        self._dialect = dialect
        self._shape = held
        self._grows = grows
        self._constrained = constrained
        self._calls_alone = calls_alone
        self._schemas = schemas
        calls = [each for each in dialect.regions if each.kind is RegionKind.CALLS]
        calls_come = bool(calls) or any(each.sort for each in dialect.regions)
        self._call_marks = tuple(mark for each in calls if not each.bare for mark in each.opens)
        self._text = UnreadText()
        self._writer = PartWriter(dialect.sections, calls_come=calls_come)
        self._open: OpenRegion | None = None
        self._inner: CallInReasoning | None = None
        self._not_calls = 0
        self._chars_left = READ_CHARS_MAX
        self._next_calls = NextCalls(self._call_marks)
        self.malformed_calls = 0
        thoughts = [each for each in dialect.regions if each.kind is RegionKind.REASONING]
        if thinking and thoughts:
            self._open = OpenRegion(thoughts[0], RegionKind.REASONING, "")
            self._writer.begin_reasoning()

    @property
    def thinking(self) -> bool:
        return self._open is not None and self._open.kind is RegionKind.REASONING

    @property
    def in_string(self) -> bool:
        """Whether a string of a call's JSON is open."""
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
        """Parse all text that is there, a bounded piece at a time."""
        while not self._is_over and (self._text.head or self._text.lengthen()):
            if not self._step(last=last and self._text.is_short) and not self._text.lengthen():
                break

    def _step(self, *, last: bool) -> bool:
        """Take the next mark or the next text. Return False if more text is needed to know which it is."""
        if self._open is None and self._opens_bare(last=last):
            return False
        now = self._open
        if now is not None and self._inner is not None:
            return self._advance_inner(now, self._inner, last=last)
        if now is not None and now.call is not None:
            self._grow(now, now.call)
            return True
        if now is not None and now.kind is RegionKind.CALLS and not now.in_head and now.form is None:
            return self._choose(now, last=last)
        start, mark = first_mark(self._text.head, self._marks(), last=last)
        if now is not None and now.json is not None and not self._take_json(now, now.json, start):
            return True
        self._pass(self._text.take(start))
        if start and mark is not None:
            return True  # behind this text other marks count
        return mark is not None and self._meet_or_pass(mark, last=last)

    def _opens_bare(self, *, last: bool) -> bool:
        """Whether nothing can be told yet, because a region may begin that has no mark of its own."""
        if self._writer.begun:
            return False
        bare = [each for each in self._dialect.regions if each.bare]
        if not bare:
            return False
        said = (self._writer.gap + self._text.head).lstrip()
        if not said:
            return not last
        for region in bare:
            if said.startswith(region.opens):
                self._writer.begin_bare()
                self._text.take(len(self._text.head) - len(self._text.head.lstrip()))
                call = None if region.head else self._held_call("")
                self._open = OpenRegion(region, region.kind, "", in_head=bool(region.head), call=call)
                return False
        return not last and any(mark.startswith(said) for region in bare for mark in region.opens)

    def _marks(self) -> tuple[str, ...]:
        """That mean something where the text is now."""
        now = self._open
        if now is not None and now.in_head:
            return (now.region.head,)
        if self._constrained and (self._writer.begun if now is None else now.kind is RegionKind.CONTENT):
            return ()
        if now is None:
            thoughts = not self._writer.begun and not self._writer.reasoned
            regions = (each for each in self._dialect.regions if not each.bare)
            opens = (each.opens for each in regions if thoughts or each.kind is not RegionKind.REASONING)
            return (*chain.from_iterable(opens), *(section.text for section in self._dialect.sections))
        ends = (*now.region.closes, *now.region.until)
        if now.kind is RegionKind.REASONING and not now.region.head:
            again = now.region.opens if self._writer.is_fresh else ()
            held = self._shape is not None or self._constrained or self._not_calls >= IN_REASONING_MAX
            return (*ends, *again, *(() if held else self._call_marks))
        if now.form is not None and now.form.parse_ahead is not None:
            return (*ends, *self._call_marks)
        return ends

    def _meet_or_pass(self, mark: str, *, last: bool) -> bool:
        """Take a mark, or pass it on as text. Returns False where more text is needed to know which."""
        now = self._open
        counts = PrefixMatch.YES
        if now is None or (now.kind is not RegionKind.CALLS and mark in now.region.until):
            counts = head_counts(self._dialect, mark, self._text.head, last=last)
        if counts is PrefixMatch.YES:
            self._meet(mark)
        elif counts is PrefixMatch.NO:
            self._pass(self._text.take(len(mark)))
        return counts is not PrefixMatch.PARTIAL

    def _meet(self, mark: str) -> None:
        """A mark is at the beginning of what is held."""
        now = self._open
        if now is None:
            if self._writer.write_section_mark(mark):
                self._text.take(len(mark))
            else:
                self._open_region(mark)
        elif now.in_head:
            self._end_head(now, mark)
        elif now.form is not None and now.form.parse_ahead is not None:
            self._meet_ahead(now, mark)
        elif mark in now.region.closes:
            self._text.take(len(mark))
            self._close(mark)
        elif mark in now.region.until:
            self._close("")
        elif mark in now.region.opens:
            self._text.take(len(mark))  # a thought that is opened again
        else:
            calls = tuple(each for each in self._dialect.regions if each.kind is RegionKind.CALLS)
            inner = OutputMarkup(calls, self._dialect.sections, self._dialect.inner)
            self._inner = CallInReasoning(mark, OutputParser(inner, self._schemas, calls_alone=True))

    def _open_region(self, mark: str) -> None:
        for region in self._dialect.regions:
            if not region.bare and mark in region.opens:
                call = self._held_call(mark) if region.kind is RegionKind.CALLS else None
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
        if now.region.sort is not None:
            now.kind = now.region.sort(now.mark + "".join(now.head))
        if now.kind is RegionKind.REASONING:
            self._writer.begin_reasoning()
        if now.kind is RegionKind.CALLS and self._shape is not None and self._shape.mark == mark:
            now.call = self._named_by(now)

    def _held_call(self, mark: str) -> ConstrainedCallParser | None:
        shape = self._shape
        return shape.of_any(self._schemas) if shape is not None and shape.mark == mark else None

    def _named_by(self, now: OpenRegion) -> ConstrainedCallParser | None:
        """A call whose name stands in its head."""
        try:
            (call,) = now.region.read(now.mark + "".join(now.head), "{}", self._schemas)
        except MalformedToolCall:
            return None
        return ConstrainedCallParser({"": call.name}, "")

    def _grow(self, now: OpenRegion, call: ConstrainedCallParser) -> None:
        """What comes is of a call that a grammar holds."""
        begun = call.name is not None
        taken, arguments = call.take(self._text.head)
        now.body.append(self._text.take(taken))
        if call.is_none:
            self._read_as_any(now)
            return
        if self._grows and call.name is not None and not begun:
            now.told = True
            self._writer.write_calls(ToolCallStart(call.name))
        if arguments and self._grows:
            self._writer.write_more_arguments(ToolCallDelta(arguments))
        now.arguments.append(arguments)
        if call.arguments_end and not now.told:
            written = "".join(now.arguments)
            if call.name is None or not is_json(written):
                self._read_as_any(now)
                return
            now.told = True
            self._writer.write_calls(CompleteToolCall(call.name, written))
        if now.region.closes and call.arguments_end:
            now.call, now.form = None, JSON_SYNTAX
        elif call.ends:
            self._open = None
            self._writer.end_call()

    def _read_as_any(self, now: OpenRegion) -> None:
        """As what nobody holds to anything."""
        self._text.prepend("".join(now.body))
        now.body.clear()
        now.call = None

    def _choose(self, now: OpenRegion, *, last: bool) -> bool:
        """Settle how the calls behind a mark are written. Returns False where more text is needed for that.
        What is no call is text again."""
        text = self._text.head.lstrip()
        layout = len(self._text.head) - len(text)
        if not text and layout <= LAYOUT_MAX:
            now.form = JSON_SYNTAX if last else None
            return last
        bodies = now.region.bodies if layout <= LAYOUT_MAX else ()
        found = [(body, body.begins(text, self._schemas)) for body in bodies]
        fits = [body for body, begins in found if begins is PrefixMatch.YES]
        perhaps = [body for body, begins in found if begins is PrefixMatch.PARTIAL]
        if not fits and perhaps and not last:
            return False
        if fits or perhaps:
            now.form = (fits or perhaps)[0]
            now.json = JsonScanner() if now.form.parse_ahead is None else None
            return True
        self._open = None
        if now.region.in_body:
            self._text.take(len(now.mark))
        self._writer.write_content(now.mark)
        return True

    def _take_json(self, now: OpenRegion, json: JsonScanner, start: int) -> bool:
        """Follow the JSON up to `start`, where a mark may be. Returns False where there is more to be read
        before: a string, or what is no JSON."""
        if json.in_string:
            self._take(now, json.take_string(self._text.head))
            return False
        taken = json.take_plain(self._text.head[:start])
        if json.broken:
            self._read_again(now)
        elif json.in_string:
            self._take(now, taken)
        return not json.broken and not json.in_string

    def _take(self, now: OpenRegion, taken: int) -> None:
        now.body.append(self._text.take(taken))

    def _read_again(self, now: OpenRegion) -> None:
        """Nothing is known of the strings of a call, so that the first mark of its end ends it."""
        self._text.prepend("".join(now.body))
        now.body.clear()
        now.json = None

    def _meet_ahead(self, now: OpenRegion, mark: str) -> None:
        """A mark in a call that is no JSON: of its end, or of another call, if it is no text."""
        if now.could_end and mark in self._call_marks:
            if self._chars_left <= 0:
                self._read_ahead(now, final=True)
                return
            if now.size >= now.next_attempt:
                if self._read_ahead(now, final=False):
                    return
                now.next_attempt = 2 * now.size
        now.could_end = now.could_end or mark in now.region.closes
        self._pass(self._text.take(len(mark)))

    def _read_ahead(self, now: OpenRegion, *, final: bool) -> bool:
        """Read the calls of a body. Returns False where they may not have ended yet. `final`: they have, and
        what is none is text, up to the first mark of an end."""
        text = "".join(now.body)
        parse_ahead = None if now.form is None else now.form.parse_ahead
        found = None if parse_ahead is None else parse_ahead(text, self._schemas, final)
        if found is None and not final:
            return False
        if found is None and parse_ahead is not None:
            end = cut_off_at(text, now.region.closes)
            if end < len(text) and (found := parse_ahead(text[:end], self._schemas, True)) is not None:
                text = text[:end]
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
        """What comes is of a call within reasoning, unless the reasoning goes on or ends. Returns False where
        more text is needed."""
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
        """The mark of a call is text of the reasoning."""
        self._inner = None
        self._not_calls += 1
        self._writer.write_reasoning(inner.mark)
        self._text.prepend("".join(inner.text)[len(inner.mark) :])

    def _finish(self, now: OpenRegion) -> None:
        """Nothing follows, and a region is open. Its text may have to be read again."""
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
        elif now.call is not None and not now.told:
            self._read_as_any(now)
        elif now.json is not None and now.json.is_open:
            self._read_again(now)
        elif now.form is not None and now.form.parse_ahead is not None:
            self._read_ahead(now, final=True)
        else:
            self._close("")

    def _pass(self, text: str) -> None:
        """Text that is no mark."""
        if not text:
            return
        now = self._open
        if now is None:
            self._writer.write_content(text)
        elif now.in_head:
            now.head.append(text)
        elif now.kind is RegionKind.CALLS:
            now.body.append(text)
            now.size += len(text)
        elif now.kind is RegionKind.REASONING:
            self._writer.write_reasoning(text)
        else:
            self._writer.write_content(text)

    def _close(self, mark: str) -> None:
        """The region that is open ends; `mark` is what ended it, "" the end or another region."""
        now = self._open
        assert now is not None
        self._open = None
        if now.in_head:
            return  # a head alone says nothing
        if now.kind is RegionKind.REASONING:
            self._writer.end_reasoning()
        if now.kind is not RegionKind.CALLS or now.told:
            return
        head, body = now.mark + "".join(now.head), "".join(now.body)
        if not (mark or now.head or body.strip() or self._writer.is_in_sentence):
            return  # the answer was cut off before a call
        try:
            calls, rest = read_calls(now.region, head, body, self._schemas, self._next_calls)
        except MalformedToolCall:
            self.malformed_calls += 1
            self._writer.write_content(head + now.region.head + body + mark)
            return
        self._writer.write_calls(*calls)
        self._text.prepend(self._next_calls.reread(rest, mark))
