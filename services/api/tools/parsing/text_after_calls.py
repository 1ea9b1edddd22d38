"""Text behind calls in JSON.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from baton.api.tools.formats.json_calls import TextAfterCall
from baton.api.tools.parsing.mark_search import cut_off_at
from baton.api.tools.parsing.output_markup import TextRegion
from baton.api.tools.parsing.output_parts import CompleteToolCall, ToolSchemas

JSON_GOES_ON: Final = ('"', ",", ":", "]", "}")
"""Characters behind a JSON value which show that the JSON is broken, and not followed by text."""
REPARSED_CHARS_MAX: Final = 2**14
"""Most characters of one answer that are parsed again behind a call without its closing mark."""


@dataclass(slots=True)
class NextCalls:
    """Calls behind a call that has no closing mark, and the budget for parsing them."""

    marks: tuple[str, ...]
    """Opening marks of calls."""
    chars_left: int = REPARSED_CHARS_MAX

    def reparse(self, rest: str, end: str) -> str:
        """Return the text behind a call that is to be parsed again. `end`: closing mark of the body."""
        if not any(mark in rest for mark in self.marks):
            return rest
        self.chars_left -= len(rest)
        return rest + end


class CallsAndRest(NamedTuple):
    """Calls at the beginning of a body."""

    calls: Sequence[CompleteToolCall]
    rest: str
    """Text behind the calls."""


def parse_calls(
    region: TextRegion, head: str, body: str, schemas: ToolSchemas, next_calls: NextCalls
) -> CallsAndRest:
    """Parse the calls of a region.

    Another call or a cut-off closing mark may follow them. If the format has no closing mark, any text may.
    Raises MalformedToolCall.
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
