"""Writer of an answer's parts, which drops whitespace and section marks between content, reasoning and calls.

Whitespace around reasoning and tool calls is formatting, and belongs to no part. It is content only if
content and a tool call are on the same line.

No I/O, clock or threads.
"""

from collections.abc import Callable, Sequence
from typing import Final

from baton.api.tools.parsing.output_markup import Previous, SectionMark
from baton.api.tools.parsing.output_parts import ContentDelta, OutputPart, ReasoningDelta

NO_GAP: Final = ""
QUOTES: Final = ("`", '"', "'", "(", "“", "‘")
GAP_MAX: Final = 256
"""Most characters of whitespace and section marks (such as `<tool_calls>`) that are held back before a tool
call."""


class PartWriter:
    """Writer of one answer's parts. The parts do not depend on how the text was cut into pieces."""

    def __init__(self, sections: Sequence[SectionMark], *, calls_come: bool) -> None:
        """Create the writer of one answer.

        `sections`: section marks of the model's format.
        `calls_come`: whether the answer may have tool calls, so that whitespace before them may be
        formatting.
        """
        self._sections = {section.text: section for section in sections}
        self._calls_come = calls_come
        self._parts: list[OutputPart] = []
        self._gap = NO_GAP
        """Held-back whitespace and section marks. They are written as content if content follows, and dropped
        otherwise."""
        self._gap_has_marks = False
        self._fresh = False
        """Whether the whitespace that comes next is formatting and is dropped, because it follows a mark of
        reasoning or a tool call."""
        self._seam = False
        """Whether reasoning or a tool call came after the last content, between it and the content that comes
        next."""
        self._last = ""
        """Last character of the content written so far."""
        self.previous = Previous.START
        self.begun = False
        """Whether content or a tool call was written. After that, no region without an opening mark may
        begin."""
        self.reasoned = False
        """Whether reasoning can no longer begin in this answer, because it has ended or a tool call has come.
        """
        self.has_content = False

    @property
    def gap(self) -> str:
        return self._gap

    @property
    def is_fresh(self) -> bool:
        """Whether only whitespace has followed since reasoning began or ended, or since a tool call."""
        return self._fresh

    @property
    def is_in_sentence(self) -> bool:
        """Whether the next text goes on in the line of the last content, or in a quotation there."""
        is_word = bool(self._gap) and "\n" not in self._gap
        return self.previous is Previous.CONTENT and (is_word or self._last in QUOTES)

    def take_parts(self) -> list[OutputPart]:
        """Return the parts of the answer that were written since the last call of this method."""
        parts, self._parts = self._parts, []
        return parts

    def write_content(self, text: str) -> None:
        self._write(text, ContentDelta)

    def write_reasoning(self, text: str) -> None:
        self._write(text, ReasoningDelta)

    def write_calls(self, *calls: OutputPart) -> None:
        """Write whole tool calls, or the start of one.

        Whitespace between content and a tool call on one line is content. Blank lines are formatting.
        """
        self._drop_marks(lambda section: section.before_calls)
        if self._gap_has_marks:
            self._write_gap()
        if self.has_content and not self._seam and self._gap and "\n" not in self._gap:
            self._parts.append(ContentDelta(self._gap))
            self._gap, self._last = NO_GAP, self._gap[-1]
        self._parts += calls
        self.begun, self.reasoned, self._seam = True, True, self.has_content
        self.previous = Previous.CALL
        if not self.has_content:
            self._fresh, self._gap = True, NO_GAP

    def write_more_arguments(self, part: OutputPart) -> None:
        self._parts.append(part)

    def begin_bare(self) -> None:
        """Begin a region whose opening mark, such as `{`, is part of its body. Held-back whitespace before
        the region is dropped."""
        self.begun, self._gap = True, NO_GAP

    def begin_reasoning(self) -> None:
        if self._gap_has_marks:
            self._write_gap()
        self._fresh, self._gap, self._seam = True, NO_GAP, self.has_content

    def end_reasoning(self) -> None:
        self.begin_reasoning()
        self.reasoned = True
        self.previous = Previous.REASONING

    def end_call(self) -> None:
        """Record that a tool call has ended, so that another one without an opening mark may follow."""
        self.begun = False

    def write_section_mark(self, mark: str) -> bool:
        """Drop a mark around a section of calls or content, hold it back, or write it as content.

        Return False for any other mark.
        """
        section = self._sections.get(mark)
        if section is None:
            return False
        if self.previous in section.after:
            return True
        if section.opens and section.opens in self._gap:
            self._drop_marks(lambda each: each.text == section.opens)
        elif section.before_calls:
            self._gap += mark
            self._gap_has_marks = True
        else:
            self.write_content(mark)
        return True

    def finish(self) -> None:
        """End the answer. Write the text that was held back, as far as it is content."""
        self._drop_marks(lambda section: section.at_end)
        if self._gap_has_marks:
            self._write_gap()
        if self._gap and not self._fresh and not self._seam:
            self._parts.append(ContentDelta(self._gap))
        self._gap = NO_GAP

    def _drop_marks(self, is_dropped: Callable[[SectionMark], bool]) -> None:
        """Remove those section marks from the held-back text for which `is_dropped` returns True. Other marks
        stay in it."""
        if not self._gap_has_marks:
            return
        for text, section in self._sections.items():
            if is_dropped(section):
                self._gap = self._gap.replace(text, "")
        self._gap_has_marks = bool(self._gap.strip())

    def _write_gap(self) -> None:
        """Write the held-back whitespace and section marks as content."""
        gap, self._gap, self._gap_has_marks = self._gap, NO_GAP, False
        self._fresh = False
        self.write_content(gap)

    def _write(self, text: str, part: type[ContentDelta] | type[ReasoningDelta]) -> None:
        """Write text as content or reasoning. Formatting whitespace before it is dropped. Whitespace at its
        end is held back until more text follows."""
        if self._gap_has_marks:
            if not text.strip() and len(self._gap) + len(text) <= GAP_MAX:
                self._gap += text
                return
            self._fresh = self._gap_has_marks = False
        if self._fresh:
            text = text.lstrip()
            if not text:
                return
            self._fresh = False
        text = self._gap + text
        self._gap = NO_GAP
        if part is ReasoningDelta or self._calls_come:
            written = text.rstrip()
            self._gap, text = text[len(written) :], written
        if text and part is ContentDelta:
            if self._seam and not self._last.isspace() and not text[0].isspace():
                text = "\n" + text
            self.begun = self.has_content = True
            self._seam, self._last = False, text[-1]
            if not text.isspace():
                self.previous = Previous.CONTENT
        if text:
            self._parts.append(part(text))
