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

from services.openai.call_in_reasoning import CallInReasoning
from services.openai.calls_and_rest import NextCalls, cut_off_at, read_calls
from services.openai.held_reading import CallShape, HeldCall
from services.openai.json_strings import JsonStrings, is_json
from services.openai.open_region import OpenRegion, first_mark, head_counts
from services.openai.output_parts import (
    Call,
    CallBegun,
    CallGrown,
    Part,
    Said,
    Schemas,
    Thought,
    Unreadable,
    joined,
)
from services.openai.output_regions import JSON_BODY, CallStart, Dialect, RegionKind

NO_GAP: Final = ""
IN_REASONING_MAX: Final = 8
"""Most marks of calls in reasoning that turn out to be text. Those behind them are."""
READ_CHARS_MAX: Final = 2**19
"""Most characters of one answer that are read as calls and are none. Behind them the next call's mark ends a
call."""
LAYOUT_MAX: Final = 256
"""Most whitespace between a mark and its call."""


class Speech:
    """One answer in a dialect. Whitespace around thoughts and calls is layout, and belongs to nothing."""

    def __init__(
        self,
        dialect: Dialect,
        schemas: Schemas,
        *,
        thinking: bool = False,
        held: CallShape | None = None,
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
        self._calls_come = bool(calls) or any(each.sort for each in dialect.regions)
        self._call_marks = tuple(mark for each in calls if not each.bare for mark in each.opens)
        self._held = ""
        self._gap = NO_GAP
        """Whitespace that is said if something follows it."""
        self._fresh = False
        """Behind a thought or a call: whitespace is layout."""
        self._begun = False
        """Something was said or called."""
        self._reasoned = False
        """Reasoning has ended."""
        self._spoken = False
        """Something was said."""
        self._seam = False
        """Something else stands between what was said and what is said next."""
        self._spaced = False
        """What was said ends with whitespace."""
        self._open: OpenRegion | None = None
        self._inner: CallInReasoning | None = None
        self._not_calls = 0
        self._chars_left = READ_CHARS_MAX
        self._next_calls = NextCalls(self._call_marks)
        self.unread = 0
        thoughts = [each for each in dialect.regions if each.kind is RegionKind.THOUGHT]
        if thinking and thoughts:
            self._open = OpenRegion(thoughts[0], RegionKind.THOUGHT, "")
            self._fresh = True

    @property
    def thinking(self) -> bool:
        return self._open is not None and self._open.kind is RegionKind.THOUGHT

    @property
    def in_string(self) -> bool:
        """Whether a string of a call's JSON is open."""
        return self._open is not None and self._open.json is not None and self._open.json.in_string

    @property
    def _is_over(self) -> bool:
        return self._calls_alone and (self._spoken or self.unread > 0)

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._advance(last=False)

    def flush(self) -> list[Part]:
        parts = self._advance(last=True)
        while self._open is not None and not self._is_over:
            self._finish(parts, self._open)
            parts += self._advance(last=True)
        if self._gap and not self._fresh and not self._seam:
            parts.append(Said(self._gap))
        self._gap = NO_GAP
        return joined(parts)

    def _advance(self, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held and not self._is_over:
            if self._open is None and self._opens_bare(last=last):
                break
            now = self._open
            if now is not None and self._inner is not None:
                if not self._advance_inner(parts, now, self._inner, last=last):
                    break
                continue
            if now is not None and now.call is not None:
                self._grow(parts, now, now.call)
                continue
            if now is not None and now.kind is RegionKind.CALLS and not now.in_head and now.form is None:
                if not self._choose(parts, now, last=last):
                    break
                continue
            start, mark = first_mark(self._held, self._marks(), last=last)
            if now is not None and now.json is not None and not self._take_json(now, now.json, start):
                continue
            self._pass(parts, self._held[:start])
            self._held = self._held[start:]
            if start and mark is not None:
                continue  # behind this text other marks count
            if mark is None or not self._meet_or_pass(parts, mark, last=last):
                break
        return joined(parts)

    def _opens_bare(self, *, last: bool) -> bool:
        """Whether nothing can be told yet, because a region may begin that has no mark of its own."""
        if self._begun:
            return False
        bare = [each for each in self._dialect.regions if each.bare]
        if not bare:
            return False
        said = (self._gap + self._held).lstrip()
        if not said:
            return not last
        for region in bare:
            if said.startswith(region.opens):
                self._begun, self._gap, self._held = True, NO_GAP, said
                call = None if region.head else self._held_call("")
                self._open = OpenRegion(region, region.kind, "", in_head=bool(region.head), call=call)
                return False
        return not last and any(mark.startswith(said) for region in bare for mark in region.opens)

    def _marks(self) -> tuple[str, ...]:
        """That mean something where the text is now."""
        now = self._open
        if now is not None and now.in_head:
            return (now.region.head,)
        if self._constrained and (self._begun if now is None else now.kind is RegionKind.SAID):
            return ()
        if now is None:
            thoughts = not self._begun and not self._reasoned
            regions = (each for each in self._dialect.regions if not each.bare)
            opens = (each.opens for each in regions if thoughts or each.kind is not RegionKind.THOUGHT)
            return (*chain.from_iterable(opens), *self._dialect.drops)
        ends = (*now.region.closes, *now.region.until)
        if now.kind is RegionKind.THOUGHT and not now.region.head:
            again = now.region.opens if self._fresh else ()
            held = self._shape is not None or self._constrained or self._not_calls >= IN_REASONING_MAX
            return (*ends, *again, *(() if held else self._call_marks))
        if now.form is not None and now.form.read_ahead is not None:
            return (*ends, *self._call_marks)
        return ends

    def _meet_or_pass(self, parts: list[Part], mark: str, *, last: bool) -> bool:
        """Take a mark, or pass it on as text. Returns False where more text is needed to know which."""
        now = self._open
        counts = CallStart.YES
        if now is None or (now.kind is not RegionKind.CALLS and mark in now.region.until):
            counts = head_counts(self._dialect, mark, self._held, last=last)
        if counts is CallStart.YES:
            self._meet(parts, mark)
        elif counts is CallStart.NO:
            self._pass(parts, mark)
            self._held = self._held[len(mark) :]
        return counts is not CallStart.PERHAPS

    def _meet(self, parts: list[Part], mark: str) -> None:
        """A mark is at the beginning of what is held."""
        now = self._open
        if now is None:
            self._open_region(mark)
        elif now.in_head:
            self._end_head(now, mark)
        elif now.form is not None and now.form.read_ahead is not None:
            self._meet_ahead(parts, now, mark)
        elif mark in now.region.closes:
            self._held = self._held[len(mark) :]
            self._close(parts, mark)
        elif mark in now.region.until:
            self._close(parts, "")
        elif mark in now.region.opens:
            self._held = self._held[len(mark) :]  # a thought that is opened again
        else:
            calls = tuple(each for each in self._dialect.regions if each.kind is RegionKind.CALLS)
            inner = Dialect(calls, self._dialect.drops, self._dialect.inner)
            self._inner = CallInReasoning(mark, Speech(inner, self._schemas, calls_alone=True))

    def _open_region(self, mark: str) -> None:
        for region in self._dialect.regions:
            if not region.bare and mark in region.opens:
                call = self._held_call(mark) if region.kind is RegionKind.CALLS else None
                self._open = OpenRegion(region, region.kind, mark, in_head=bool(region.head), call=call)
                self._begin(region.kind)
                if region.in_body:
                    return
                break
        self._held = self._held[len(mark) :]

    def _end_head(self, now: OpenRegion, mark: str) -> None:
        self._held = self._held[len(mark) :]
        now.in_head = False
        if now.region.sort is not None:
            now.kind = now.region.sort(now.mark + "".join(now.head))
        self._begin(now.kind)
        if now.kind is RegionKind.CALLS and self._shape is not None and self._shape.mark == mark:
            now.call = self._named_by(now)

    def _held_call(self, mark: str) -> HeldCall | None:
        shape = self._shape
        return shape.of_any(self._schemas) if shape is not None and shape.mark == mark else None

    def _named_by(self, now: OpenRegion) -> HeldCall | None:
        """A call whose name stands in its head."""
        try:
            (call,) = now.region.read(now.mark + "".join(now.head), "{}", self._schemas)
        except Unreadable:
            return None
        return HeldCall({"": call.name}, "")

    def _grow(self, parts: list[Part], now: OpenRegion, call: HeldCall) -> None:
        """What comes is of a call that a grammar holds."""
        begun = call.name is not None
        taken, arguments = call.take(self._held)
        now.body.append(self._held[:taken])
        self._held = self._held[taken:]
        if call.is_none:
            self._read_as_any(now)
            return
        if self._grows and call.name is not None and not begun:
            now.told = True
            self._tell(parts, CallBegun(call.name))
        if arguments and self._grows:
            parts.append(CallGrown(arguments))
        now.arguments.append(arguments)
        if call.arguments_end and not now.told:
            written = "".join(now.arguments)
            if call.name is None or not is_json(written):
                self._read_as_any(now)
                return
            now.told = True
            self._tell(parts, Call(call.name, written))
        if now.region.closes and call.arguments_end:
            now.call, now.form = None, JSON_BODY
        elif call.ends:
            self._open, self._begun = None, False

    def _read_as_any(self, now: OpenRegion) -> None:
        """As what nobody holds to anything."""
        self._held = "".join(now.body) + self._held
        now.body.clear()
        now.call = None

    def _choose(self, parts: list[Part], now: OpenRegion, *, last: bool) -> bool:
        """Settle how the calls behind a mark are written. Returns False where more text is needed for that.
        What is no call is text again."""
        text = self._held.lstrip()
        layout = len(self._held) - len(text)
        if not text and layout <= LAYOUT_MAX:
            now.form = JSON_BODY if last else None
            return last
        bodies = now.region.bodies if layout <= LAYOUT_MAX else ()
        found = [(body, body.begins(text, self._schemas)) for body in bodies]
        fits = [body for body, begins in found if begins is CallStart.YES]
        perhaps = [body for body, begins in found if begins is CallStart.PERHAPS]
        if not fits and perhaps and not last:
            return False
        if fits or perhaps:
            now.form = (fits or perhaps)[0]
            now.json = JsonStrings() if now.form.read_ahead is None else None
            return True
        self._open = None
        if now.region.in_body:
            self._held = self._held[len(now.mark) :]
        self._say(parts, now.mark, Said)
        return True

    def _take_json(self, now: OpenRegion, json: JsonStrings, start: int) -> bool:
        """Follow the JSON up to `start`, where a mark may be. Returns False where there is more to be read
        before: a string, or what is no JSON."""
        if json.in_string:
            self._take(now, json.take_string(self._held))
            return False
        taken = json.take_plain(self._held[:start])
        if json.broken:
            self._read_again(now)
        elif json.in_string:
            self._take(now, taken)
        return not json.broken and not json.in_string

    def _take(self, now: OpenRegion, taken: int) -> None:
        now.body.append(self._held[:taken])
        self._held = self._held[taken:]

    def _read_again(self, now: OpenRegion) -> None:
        """Nothing is known of the strings of a call, so that the first mark of its end ends it."""
        self._held = "".join(now.body) + self._held
        now.body.clear()
        now.json = None

    def _meet_ahead(self, parts: list[Part], now: OpenRegion, mark: str) -> None:
        """A mark in a call that is no JSON: of its end, or of another call, if it is no text."""
        if now.could_end and mark in self._call_marks:
            if self._chars_left <= 0:
                self._read_ahead(parts, now, final=True)
                return
            if now.size >= now.next_attempt:
                if self._read_ahead(parts, now, final=False):
                    return
                now.next_attempt = 2 * now.size
        now.could_end = now.could_end or mark in now.region.closes
        self._pass(parts, mark)
        self._held = self._held[len(mark) :]

    def _read_ahead(self, parts: list[Part], now: OpenRegion, *, final: bool) -> bool:
        """Read the calls of a body. Returns False where they may not have ended yet. `final`: they have, and
        what is none is text, up to the first mark of an end."""
        text = "".join(now.body)
        read_ahead = None if now.form is None else now.form.read_ahead
        found = None if read_ahead is None else read_ahead(text, self._schemas, final)
        if found is None and not final:
            return False
        if found is None and read_ahead is not None:
            end = cut_off_at(text, now.region.closes)
            if end < len(text) and (found := read_ahead(text[:end], self._schemas, True)) is not None:
                text = text[:end]
        self._open = None
        if found is not None:
            self._tell(parts, *found.calls)
            self._held = text[found.end :] + self._held
            return True
        self._chars_left -= len(text)
        self.unread += 1
        start, mark = first_mark(text, now.region.closes, last=True)
        end = start + len(mark or "")
        self._say(parts, ("" if now.region.in_body else now.mark) + text[:end], Said)
        self._held = text[end:] + self._held
        return True

    def _advance_inner(
        self, parts: list[Part], now: OpenRegion, inner: CallInReasoning, *, last: bool
    ) -> bool:
        """What comes is of a call within reasoning, unless the reasoning goes on or ends. Returns False where
        more text is needed."""
        start, mark = first_mark(self._held, now.region.closes, last=last)
        inner.push(self._held[:start])
        self._held = self._held[start:]
        if mark is not None and not inner.failed and inner.parser.in_string:
            inner.push(mark)
            self._held = self._held[len(mark) :]
        elif mark is not None or inner.failed:
            self._resume(parts, inner)
        else:
            return False
        return True

    def _resume(self, parts: list[Part], inner: CallInReasoning) -> None:
        """The mark of a call is text of the reasoning."""
        self._inner = None
        self._not_calls += 1
        self._say(parts, inner.mark, Thought)
        self._held = "".join(inner.text)[len(inner.mark) :] + self._held

    def _finish(self, parts: list[Part], now: OpenRegion) -> None:
        """Nothing follows, and a region is open. Its text may have to be read again."""
        inner = self._inner
        if inner is not None:
            inner.flush()
            if inner.failed or not inner.parts:
                self._not_calls += IN_REASONING_MAX // 2
                self._resume(parts, inner)
                return
            self._inner = None
            self._close(parts, "")
            self._tell(parts, *inner.parts)
        elif now.call is not None and not now.told:
            self._read_as_any(now)
        elif now.json is not None and now.json.is_open:
            self._read_again(now)
        elif now.form is not None and now.form.read_ahead is not None:
            self._read_ahead(parts, now, final=True)
        else:
            self._close(parts, "")

    def _begin(self, kind: RegionKind) -> None:
        if kind is RegionKind.THOUGHT:
            self._fresh, self._gap, self._seam = True, NO_GAP, self._spoken

    def _tell(self, parts: list[Part], *calls: Part) -> None:
        """Calls, or the beginning of one. Whitespace on their line is content, blank lines are layout."""
        if self._spoken and not self._seam and self._gap and "\n" not in self._gap:
            parts.append(Said(self._gap))
            self._gap, self._spaced = NO_GAP, True
        parts += calls
        self._begun, self._reasoned, self._seam = True, True, self._spoken
        if not self._spoken:
            self._fresh, self._gap = True, NO_GAP

    def _pass(self, parts: list[Part], text: str) -> None:
        """Text that is no mark."""
        if not text:
            return
        now = self._open
        if now is None:
            self._say(parts, text, Said)
        elif now.in_head:
            now.head.append(text)
        elif now.kind is RegionKind.CALLS:
            now.body.append(text)
            now.size += len(text)
        else:
            self._say(parts, text, Thought if now.kind is RegionKind.THOUGHT else Said)

    def _say(self, parts: list[Part], text: str, part: type[Said] | type[Thought]) -> None:
        """Leading whitespace of what is fresh is dropped, trailing held back until it is known not to be."""
        if self._fresh:
            text = text.lstrip()
            if not text:
                return
            self._fresh = False
        text = self._gap + text
        self._gap = NO_GAP
        if part is Thought or self._calls_come:
            kept = text.rstrip()
            self._gap, text = text[len(kept) :], kept
        if text and part is Said:
            if self._seam and not self._spaced and not text[0].isspace():
                text = "\n" + text
            self._begun = self._spoken = True
            self._seam, self._spaced = False, text[-1].isspace()
        if text:
            parts.append(part(text))

    def _close(self, parts: list[Part], mark: str) -> None:
        """The region that is open ends; `mark` is what ended it, "" the end or another region."""
        now = self._open
        assert now is not None
        self._open = None
        if now.in_head:
            return  # a head alone says nothing
        self._begin(now.kind)
        self._reasoned = self._reasoned or now.kind is RegionKind.THOUGHT
        if now.kind is not RegionKind.CALLS or now.told:
            return
        head, body = now.mark + "".join(now.head), "".join(now.body)
        if not (mark or now.head or body.strip()):
            return  # a mark alone says nothing
        try:
            calls, rest = read_calls(now.region, head, body, self._schemas, self._next_calls)
        except Unreadable:
            self.unread += 1
            self._say(parts, head + now.region.head + body + mark, Said)
            return
        self._tell(parts, *calls)
        self._held = self._next_calls.reread(rest, mark) + self._held
