"""Calls of JSON behind which a text goes on, and marks that the end of a text cuts off.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from baton.api.tools.formats.json_calls import Followed
from baton.api.tools.parsing.output_markup import TextRegion
from baton.api.tools.parsing.output_parts import CompleteToolCall, ToolSchemas

JSON_GOES_ON: Final = ('"', ",", ":", "]", "}")
"""What follows JSON that is broken, and no text."""
REREAD_CHARS_MAX: Final = 2**14
"""Most characters of one answer, with calls among them, that are read again behind a call that has no mark of
its end."""


@dataclass(slots=True)
class NextCalls:
    """Calls behind a call that has no mark of its end."""

    marks: tuple[str, ...]
    """Before calls."""
    chars_left: int = REREAD_CHARS_MAX

    def reread(self, rest: str, end: str) -> str:
        """The text behind calls, which is read again. `end`: the mark of the last one's end."""
        if not any(mark in rest for mark in self.marks):
            return rest
        self.chars_left -= len(rest)
        return rest + end


class CallsAndRest(NamedTuple):
    """Calls at the beginning of a body."""

    calls: Sequence[CompleteToolCall]
    rest: str
    """The text behind them."""


def read_calls(
    region: TextRegion, head: str, body: str, schemas: ToolSchemas, next_calls: NextCalls
) -> CallsAndRest:
    """Read the calls of a region behind its head. Behind them may stand another call, a cut-off mark of their
    end, and any text where calls have no mark of their end. Raises Unreadable."""
    try:
        return CallsAndRest(region.read(head, body, schemas), "")
    except Followed as followed:
        rest = followed.rest
        started = rest.lstrip()
        is_cut_off = cut_off_at(started, region.closes) == 0
        is_call = started.startswith(next_calls.marks)
        is_long = len(rest) > next_calls.chars_left and any(mark in rest for mark in next_calls.marks)
        if region.bare or not body.endswith(rest) or started.startswith(JSON_GOES_ON) or is_long:
            raise
        if region.closes and not is_cut_off and not is_call:
            raise
    calls = region.read(head, body[: len(body) - len(rest)], schemas)
    return CallsAndRest(calls, "" if is_cut_off else rest)


def cut_off_at(text: str, marks: Sequence[str]) -> int:
    """Where the longest beginning of one of these marks stands that ends the text; else its length."""
    beginnings = (length for mark in marks for length in range(1, len(mark)) if text.endswith(mark[:length]))
    return len(text) - max(beginnings, default=0)
