"""Parsing of JSON tool calls that are followed by text, such as another call or a cut-off closing mark.

No I/O, clock or threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from baton.api.tools.formats.json_calls import TextAfterCall
from baton.api.tools.parsing.mark_search import cut_off_at
from baton.api.tools.parsing.output_markup import TextRegion
from baton.api.tools.parsing.output_parts import CompleteToolCall, ToolSchemas

JSON_GOES_ON: Final = ('"', ",", ":", "]", "}")
"""Characters that show, directly after a complete JSON value, that the JSON of a tool call is broken. Other
characters begin a text after the call."""
REPARSED_CHARS_MAX: Final = 2**14
"""Most characters of one answer that are parsed a second time. They are text after a tool call that has no
closing mark."""


@dataclass(slots=True)
class NextCalls:
    """Opening marks of tool calls that may follow a call without a closing mark, and the number of characters
    that may still be parsed again."""

    marks: tuple[str, ...]
    """Opening marks of tool calls, such as `<tool_call>`."""
    chars_left: int = REPARSED_CHARS_MAX

    def reparse(self, rest: str, end: str) -> str:
        """Return the text after a tool call. If it has another call, it has to be parsed again: then its size
        is charged to the budget.

        `end`: closing mark after the text, which is put back if the text is parsed again.
        """
        if not any(mark in rest for mark in self.marks):
            return rest
        self.chars_left -= len(rest)
        return rest + end


class CallsAndRest(NamedTuple):
    """Tool calls at the beginning of a region's body, and the text after them."""

    calls: Sequence[CompleteToolCall]
    rest: str
    """Text in the region's body after the last tool call."""


def parse_calls(
    region: TextRegion, head: str, body: str, schemas: ToolSchemas, next_calls: NextCalls
) -> CallsAndRest:
    """Return the tool calls in a region's body, and the text after them.

    Another call or a cut-off closing mark may follow them. If the format has no closing mark, any text may
    follow. Raises MalformedToolCall.
    """
    try:
        return CallsAndRest(region.read(head, body, schemas), "")
    except TextAfterCall as error:
        rest = error.rest
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
