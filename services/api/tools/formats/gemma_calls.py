"""Parser of tool calls in Gemma's notation: `call:name{key:<|"|>text<|"|>,other:3}`.

Strings are not escaped. A quote ends a string only if an object or a list can go on after it.

No I/O, clock or threads.
"""

import re
from typing import Any, Final

from baton.api.tools.formats.json_calls import call_of, decoded, json_value
from baton.api.tools.parsing.output_markup import CallSyntax, ParsedCalls, PrefixMatch
from baton.api.tools.parsing.output_parts import CompleteToolCall, MalformedToolCall, ToolSchemas

CALL: Final = re.compile(r"\s*(?:call:)?([\w.-]{1,256})\s*(?=\{)")
QUOTES: Final = re.compile(r'<\|"\|>|<escape>')
KEY: Final = re.compile(r"[^:,{}\[\]<>\"]{1,256}(?=:)")
OPENS: Final = re.compile(r"<\|tool_call>|<start_function_call>")
CLOSES: Final = re.compile(r"<tool_call\|>|<end_function_call>")
CLOSED: Final = r"\s*(?:[}\]]\s*)*(?:<tool_call\|>|<end_function_call>)"
LAST: Final = re.compile(CLOSED)
"""Pattern of the end of a tool call after its last string: closing brackets and the closing mark."""
BEHIND: Final = re.compile(
    rf"{CLOSED}|\s*(?:[}}\]]\s*)*(?:\Z|,\s*(?:"
    r'[^:,{}\[\]<>"]{1,256}:|<\|"\|>|<escape>|[-\d"{\[]|true|false|null))'
)
"""Pattern of what may follow a string in a tool call: the call's end, or another item. A quote that is not
followed by it does not end the string."""
NEXT: Final = re.compile(rf"\s*(?P<opens>{OPENS.pattern}){CALL.pattern}")
"""Pattern of the start of another tool call, directly after a call without its closing mark."""
UNENDED: Final = re.compile(rf"\s*[}}\]][}}\]\s]*(?:{OPENS.pattern}){CALL.pattern}")
"""Pattern of the end of a tool call without its closing mark, after its last string: brackets, then another
call."""
MARKS: Final = re.compile(rf"(?P<opens>{OPENS.pattern})|(?P<closes>{CLOSES.pattern})|{QUOTES.pattern}")
ALL_ENDS: Final = re.compile(rf"(?:{QUOTES.pattern}){CLOSED}")
BARE: Final = re.compile(r"[^,\]}]{1,64}")
SPACE: Final = re.compile(r"\s*")
DEPTH_MAX: Final = 64
UNQUOTED_MAX: Final = 8
"""Most tool calls in a row, each without the closing quote of its last string, that are still parsed."""
UNQUOTED_CHARS_MAX: Final = 2**14
"""Longest text of an answer, in characters, in which tool calls without a closing quote are looked for."""


class _GemmaReader:
    """Parser of one tool call in Gemma's notation."""

    def __init__(self, text: str, *, counted: bool, unquoted: int = 0, least: int = 0) -> None:
        """Start at the beginning of a tool call.

        `counted`: whether tool calls within a string are counted, so that the string ends after them.
        `unquoted`: number of tool calls in a row whose last string may lack its closing quote, if another
        call follows.
        `least`: index in the text before which the last string cannot end.
        """
        self._text = text
        self._counted = counted
        self._unquoted = unquoted
        self._least = least
        self.at = 0

    def call(self) -> tuple[str, Any]:
        """Parse the tool call `call:name{…}`, and return its name and its arguments. Raises
        MalformedToolCall."""
        found = CALL.match(self._text)
        if found is None:
            raise MalformedToolCall(self._text)
        self.at = found.end()
        return found[1], self._value(0)

    def _value(self, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise MalformedToolCall(self._text)
        self._skip()
        char = self._text[self.at : self.at + 1]
        if char == "{":
            return self._object(depth)
        if char == "[":
            return self._list(depth)
        if char == '"':
            value, self.at = decoded(self._text, self.at)
            return value
        if (quotes := QUOTES.match(self._text, self.at)) is not None:
            return self._unended(quotes.end(), depth) or self._quoted(quotes[0])
        found = BARE.match(self._text, self.at)
        if found is None:
            raise MalformedToolCall(self._text)
        self.at = found.end()
        return json_value(found[0])

    def _object(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while self._goes_on("}", first=not made):
            key = self._key()
            self._take(":")
            made[key] = self._value(depth + 1)
        return made

    def _list(self, depth: int) -> list[Any]:
        made: list[Any] = []
        while self._goes_on("]", first=not made):
            made.append(self._value(depth + 1))
        return made

    def _goes_on(self, end: str, *, first: bool) -> bool:
        """Move to the next item of an object or a list, over the comma. Return False after the last item.

        `end`: closing bracket. `first`: whether no item was parsed yet.
        """
        if first:
            self.at += 1
            self._skip()
        else:
            self._skip()
            if self._text[self.at : self.at + 1] != end:
                self._take(",")
                self._skip()
        if self._text[self.at : self.at + 1] == end:
            self.at += 1
            return False
        return True

    def _key(self) -> str:
        if self._text[self.at : self.at + 1] == '"' or QUOTES.match(self._text, self.at):
            return str(self._value(DEPTH_MAX))
        found = KEY.match(self._text, self.at)
        if found is None:
            raise MalformedToolCall(self._text)
        self.at = found.end()
        return found[0].strip()

    def _quoted(self, quotes: str) -> str:
        """Parse the string at the present position, which stands between two marks `quotes`, and return it.
        Raises MalformedToolCall."""
        start = self.at + len(quotes)
        within = 0
        for found in MARKS.finditer(self._text, start):
            if found["opens"] is not None:
                within += self._counted
            elif found["closes"] is not None:
                within = max(0, within - 1)
            elif found[0] == quotes and self._ends_text(found.end(), within):
                self.at = found.end()
                return self._text[start : found.start()]
        raise MalformedToolCall(self._text)

    def _unended(self, start: int, depth: int) -> str | None:
        """Return a tool call's last string if it lacks its closing quote and a whole call follows, else None.

        `start`: index of the string. `depth`: number of open brackets.
        """
        if not self._unquoted:
            return None
        end = re.compile(rf"(?:[}}\]]\s*){{{depth}}}(?:{CLOSES.pattern})").search(self._text, start)
        if end is None or QUOTES.search(self._text, start, end.start()) is not None:
            return None
        behind = NEXT.match(self._text, end.end())
        if behind is None:
            return None
        following = self._text[behind.end("opens") :]
        if all(_read(following, final=True, unquoted=each) is None for each in (0, self._unquoted - 1)):
            return None
        self.at = end.start()
        return self._text[start : self.at]

    def _ends_text(self, at: int, within: int) -> bool:
        if self._text[at : at + 1] == ":":
            return True
        is_last = any(each.match(self._text, at) is not None for each in (LAST, UNENDED))
        is_text = is_last and (within > 0 or at < self._least)
        return not is_text and any(each.match(self._text, at) is not None for each in (BEHIND, UNENDED))

    def _take(self, char: str) -> None:
        self._skip()
        if self._text[self.at : self.at + 1] != char:
            raise MalformedToolCall(self._text)
        self.at += 1

    def _skip(self) -> None:
        found = SPACE.match(self._text, self.at)
        self.at = self.at if found is None else found.end()


def _begins(text: str, _: ToolSchemas) -> PrefixMatch:
    return PrefixMatch.YES if re.match(r"[\w.:-]", text) else PrefixMatch.NO


def _read(
    text: str, *, final: bool, counted: bool = True, unquoted: int = 0, least: int = 0
) -> tuple[CompleteToolCall, int] | None:
    """Return the tool call at the beginning of a text and the index of its end, or None."""
    reader = _GemmaReader(text, counted=counted, unquoted=unquoted, least=least)
    try:
        call = call_of(*reader.call())
    except MalformedToolCall:
        return None
    closed = LAST.match(text, reader.at)
    if closed is not None:
        return call, closed.end()
    if NEXT.match(text, reader.at) is not None:
        return call, reader.at
    return (call, reader.at) if final and not text[reader.at :].strip() else None


def _read_ahead(text: str, _: ToolSchemas, final: bool) -> ParsedCalls | None:
    """Parse the first tool call, and those that follow it without a closing mark between them."""
    calls: list[CompleteToolCall] = []
    at = end = 0
    while (found := _read_first(text[at:], final=final)) is not None:
        calls.append(found[0])
        end = at + found[1]
        behind = NEXT.match(text, end)
        if behind is None or text.endswith(("<tool_call|>", "<end_function_call>"), at, end):
            break
        at = behind.end("opens")
    return ParsedCalls(tuple(calls), end) if calls else None


def _read_first(text: str, *, final: bool) -> tuple[CompleteToolCall, int] | None:
    counted = True
    found = _read(text, final=final)
    if found is None and final and len(text) <= UNQUOTED_CHARS_MAX:
        found = _read(text, final=final, unquoted=UNQUOTED_MAX)
        if found is not None:
            return found
    if found is None and final:
        counted = False
        found = _read(text, final=final, counted=counted)
    if found is None:
        return None
    behind = OPENS.search(text, found[1])
    limit = len(text) if behind is None else behind.start()
    ends = [each.start() for each in ALL_ENDS.finditer(text, found[1], limit)]
    if ends:
        found = _read(text, final=final, counted=counted, least=ends[-1]) or found
    return found


GEMMA_SYNTAX: Final = CallSyntax(_begins, _read_ahead)
