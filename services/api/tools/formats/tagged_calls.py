"""Parser of tool calls whose arguments are written between tags, without escaping.

An argument may hold any text, even the tags of its own format. So a tag counts only in a position where it
makes sense: a tag that ends an argument is followed by the next argument or by the end of the call. Tool
calls within an argument, such as an example of the format, are counted, and the argument ends after them. If
several tags could end a call, the last one before the next call does.

No I/O, clock or threads.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple


class Argument(NamedTuple):
    key: str
    type: str | None
    """Type that the argument's tag declares, such as `string`. None if the tag declares none."""
    text: str


class TaggedCall(NamedTuple):
    name: str
    arguments: tuple[Argument, ...]


class Reading(NamedTuple):
    """Result of parsing the tool calls at the beginning of a text."""

    calls: Sequence[TaggedCall]
    end: int
    """Index in the text of the first character after the tool calls."""
    closed: bool
    """Whether the tag that closes the whole list of tool calls follows them."""


@dataclass(frozen=True, slots=True)
class TagFormat:
    """Tags of one format of tool calls, as regular expressions. The format writes each argument
    between tags."""

    opens: str
    """Pattern of the tag that opens the whole list of tool calls."""
    closes: str
    """Pattern of the tag that closes the whole list of tool calls."""
    call: str
    """Pattern of the tag before a tool call's arguments, with the group `name`."""
    call_ends: str
    """Pattern of the tag after a tool call's arguments. It is empty if only the tag `closes` ends
    the call."""
    argument: str
    """Pattern of the tag before an argument, with the group `key` and perhaps the group `type`."""
    argument_ends: str
    begins: str
    """Literal text with which the first tool call begins. Empty if the call begins with the tool's name."""
    bare: bool = False
    """Whether the tag before the list of tool calls is missing in this variant of a format. The tag after the
    list may be missing, too."""
    single_line_ends: bool = False
    """Whether one line end before and one after an argument is formatting, and is dropped."""
    escaped: tuple[tuple[str, str], ...] = ()
    """Escapes that the format uses within a tag, as pairs of the written text and the character that it
    stands for."""

    def unescape(self, text: str) -> str:
        for written, meant in self.escaped:
            text = text.replace(written, meant)
        return text


NAME: Final = r"[^\s<>{}\[\]\"'`,;()]{1,256}"
QUOTED_NAME: Final = r' name="(?P<name>[^"]{1,256})"\s*(?:/>|>)'
ANGLES: Final = ("<", "</", ">")
"""Patterns of angle brackets in tags: the beginning of an opening tag, the beginning of a closing tag, and
the end of either."""


def _format(
    section: str,
    call: tuple[str, str],
    argument: tuple[str, str],
    begins: str,
    *,
    around: tuple[str, str, str] = ANGLES,
    **options: Any,
) -> TagFormat:
    """Return a format of tool calls whose tags are all written alike.

    `section`: name of the tag around all calls.
    `call`, `argument`: name of the tag, and the pattern of the rest of the opening tag.
    `begins`, `options`: fields of TagFormat.
    `around`: patterns of the beginning of an opening tag, of a closing tag, and of the end of both.
    """
    opens, closes, ends = around
    return TagFormat(
        opens=f"{opens}{section}{ends}",
        closes=f"{closes}{section}{ends}",
        call="".join((opens, *call)),
        call_ends=f"{closes}{call[0]}{ends}",
        argument="".join((opens, *argument)),
        argument_ends=f"{closes}{argument[0]}{ends}",
        begins=begins,
        **options,
    )


QWEN: Final = _format(
    "tool_call",
    ("function", r"=(?P<name>[^<>\s]{1,256})\s*>"),
    ("parameter", r"=(?P<key>[^<>\n]{1,256})>"),
    "<function=",
    single_line_ends=True,
)
QWEN_BARE: Final = replace(QWEN, opens="", bare=True)
GLM: Final = replace(
    _format("tool_call", ("", ""), ("arg_value", ""), ""),
    call=rf"(?P<name>{NAME})",
    call_ends="",
    argument=r"<arg_key>(?P<key>[^<]{0,256})</arg_key>\s*<arg_value>",
)
MINIMAX: Final = _format(
    "minimax:tool_call",
    ("invoke", QUOTED_NAME),
    ("parameter", r' name="(?P<key>[^"]{1,256})"\s*>'),
    '<invoke name="',
)
DSML: Final = _format(
    "(?:function_calls|tool_calls|calls)",
    ("invoke", QUOTED_NAME),
    ("parameter", r' name="(?P<key>[^"]{1,256})"(?: string="(?P<type>true|false)")?\s*>'),
    "<｜DSML｜",
    around=("<｜DSML｜ ?", "</｜DSML｜ ?", ">"),
)
KIMI_K3: Final = _format(
    "tools",
    ("call", r' tool="(?P<name>[^"]{1,256})"[^<>]{0,256}<\|sep\|>'),
    (
        "argument",
        r' key="(?P<key>[^"]{0,256})"(?: type="(?P<type>[^"]{0,64})")?[^<>]{0,64}<\|sep\|>',
    ),
    '<|open|>call tool="',
    around=(r"<\|open\|>", r"<\|close\|>", r"<\|sep\|>"),
    escaped=(("&quot;", '"'), ("&amp;", "&")),
)


@dataclass(frozen=True, slots=True)
class _Patterns:
    """Compiled regular expressions of a format's tags. Each matches only in positions where its tag
    counts."""

    call: re.Pattern[str]
    argument: re.Pattern[str]
    ends: re.Pattern[str]
    """Pattern of the three tags that matter within an argument: its closing tag, the start of a tool call
    within it, and the end of that call."""
    call_ends: re.Pattern[str]
    closes: re.Pattern[str]
    all_ends: re.Pattern[str]
    """Pattern of the closing tags from the end of the last argument to the end of all tool calls, one after
    the other."""
    unended: re.Pattern[str]
    """Pattern of the end of the tool calls if the closing tag of the last argument is missing."""
    next_call: re.Pattern[str]
    next_argument: re.Pattern[str]
    """Pattern of an argument on a new line, after an argument whose closing tag is missing."""


@cache
def _patterns(tags: TagFormat) -> _Patterns:
    call, argument = _unnamed(tags.call), _unnamed(tags.argument)
    around = "|".join(each for each in (tags.closes, tags.opens) if each)
    closes = rf"(?:{tags.closes})?" if tags.bare else tags.closes
    if tags.call_ends:
        behind = rf"{tags.call_ends}\s*(?:{around}|{call}|\Z)"
        # No leading `\s*` here: a search would scan a run of whitespace again from each of its characters.
        opens = rf"(?:{tags.opens}\s*)?" if tags.opens else ""
        inner = rf"{opens}{call}(?=\s*(?:{argument}|{tags.call_ends}))"
        final = rf"{tags.call_ends}\s*{closes}"
    else:
        behind, final = tags.closes, closes
        inner = rf"{tags.opens}\s*{call}\s*(?={argument}|{tags.closes})"
    if tags.bare:
        behind = tags.call_ends
    end = rf"(?P<end>{tags.argument_ends})(?=\s*(?:{argument}|{behind}))"
    ends = rf"(?P<inner>{inner})|{end}|(?P<inner_end>{tags.call_ends or tags.closes})"
    patterns = (
        tags.call,
        tags.argument,
        ends,
        rf"{tags.call_ends}(?=\s*(?:{around}|{call}|\Z))" if not tags.bare else tags.call_ends,
        closes,
        rf"{tags.argument_ends}\s*{final}",
        final,
        inner,
        rf"\n(?=[ \t]{{0,16}}{tags.argument})",
    )
    return _Patterns(*(re.compile(each, re.DOTALL) for each in patterns))


def _unnamed(pattern: str) -> str:
    """Return a regular expression without the names of its groups."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


Keys = Mapping[str, Collection[str]]
"""Names of the arguments that each tool takes, by the tool's name."""


def read_calls(text: str, tags: TagFormat, keys: Keys, *, final: bool) -> Reading | None:
    """Return the tool calls at the beginning of a text after the tag `opens`, or None if there are none.

    `final`: whether nothing follows the text. If something does, the tool calls and all within them have to
    be closed.
    """
    for counted, ended in ((True, True), (False, True), (False, False)):
        reading = _TagReader(text, tags, keys, counted=counted, ended=ended).read()
        if reading is not None and (final or reading.closed):
            return reading
        if not final:
            return None
    return None


class _TagReader:
    """Parser of the tool calls at the beginning of one text, if arguments are written between tags."""

    def __init__(self, text: str, tags: TagFormat, keys: Keys, *, counted: bool, ended: bool) -> None:
        """Start an attempt to parse a text.

        `counted`: whether tool calls within an argument are counted, so that the argument ends after them.
        `ended`: whether each argument must have its closing tag.
        """
        self._text = text
        self._tags = tags
        self._keys = keys
        self._patterns = _patterns(tags)
        self._counted = counted
        self._ended = ended
        self._least = 0
        """Index in the text before which the tool calls cannot end. A tag before it belongs to an argument.
        """

    def read(self) -> Reading | None:
        calls: list[TaggedCall] = []
        at = start = 0
        while (ends := self._closes(calls, self._skip(at))) is None:
            start = self._skip(at)
            read = self._read_call(start)
            if read is None:
                return Reading(calls, at, closed=False) if calls else None
            call, at = read
            calls.append(call)
        if (least := self._last_end(ends)) is not None and calls[-1].arguments:
            self._least = least
            longer = self._read_call(start)
            longer_ends = None if longer is None else self._closes(calls, self._skip(longer[1]))
            if longer is not None and longer_ends is not None:
                calls[-1], ends = longer[0], longer_ends
        return Reading(calls, ends, closed=True)

    def _closes(self, calls: Sequence[TaggedCall], at: int) -> int | None:
        """Return the index after the tag that closes all tool calls. Return None if that tag is not at the
        index `at`."""
        found = self._patterns.closes.match(self._text, at) if calls else None
        if found is None or (not found[0] and self._patterns.call.match(self._text, at) is not None):
            return None
        return found.end()

    def _last_end(self, at: int) -> int | None:
        """Return the index of the last tag that could end the last argument, or None. Tags after the start of
        another tool call are not searched."""
        behind = self._patterns.next_call.search(self._text, at)
        limit = len(self._text) if behind is None else behind.start()
        last = None
        for last in self._patterns.all_ends.finditer(self._text, at, limit):  # noqa: B007
            pass
        return None if last is None else last.start()

    def _skip(self, at: int) -> int:
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        return at

    def _read_call(self, at: int) -> tuple[TaggedCall, int] | None:
        """Return the tool call at index `at` of the text, and the index of its end. Return None if there is
        no complete call."""
        begun = self._patterns.call.match(self._text, at)
        if begun is None:
            return None
        name, at = self._tags.unescape(begun["name"]), begun.end()
        if begun[0].endswith("/>"):
            return TaggedCall(name, ()), at
        arguments: list[Argument] = []
        while (own := self._patterns.argument.match(self._text, self._skip(at))) is not None:
            key, start = self._tags.unescape(own["key"]).strip(), own.end()
            given = {each.key for each in arguments} | {key}
            bounds = self._value(start, set(self._keys.get(name, ())) - given)
            if bounds is None:
                return None
            end, at = bounds
            type_ = own["type"] if "type" in self._patterns.argument.groupindex else None
            arguments.append(Argument(key, type_, self._value_text(start, end)))
        at = self._skip(at)
        ends = (self._patterns.call_ends if self._tags.call_ends else self._patterns.closes).match(
            self._text, at
        )
        if ends is None:
            return None
        return TaggedCall(name, tuple(arguments)), ends.end() if self._tags.call_ends else at

    def _value(self, start: int, missing: Collection[str]) -> tuple[int, int] | None:
        """Return two indexes: that at which the argument that begins at `start` ends, and that at which
        parsing goes on. Return None if it does not end.

        `missing`: names of the arguments that may follow.
        """
        within = 0
        inner = False
        for found in self._patterns.ends.finditer(self._text, start):
            if found["end"] is not None and not within and not self._is_text(found.start()):
                unended = None if inner else self._unended(start, found.start(), missing)
                return unended or (found.start(), found.end())
            if self._counted and found["inner"] is not None:
                within += 1
                inner = True
            elif found["inner_end"] is not None:
                within = max(0, within - 1)
        if self._ended:
            return None
        last = None
        for last in self._patterns.unended.finditer(self._text, start):  # noqa: B007
            pass
        if last is None:
            return None
        return len(self._text[: last.start()].rstrip()), last.start()

    def _is_text(self, at: int) -> bool:
        """Return whether the closing tag at index `at` is text of the last argument, because the tool calls
        would end before the index `_least`."""
        return at < self._least and self._patterns.all_ends.match(self._text, at) is not None

    def _unended(self, start: int, end: int, missing: Collection[str]) -> tuple[int, int] | None:
        """Return the index of the next argument, if the closing tag of the argument before it is missing.
        Otherwise return None.

        The next argument is one of `missing`, begins on its own line between `start` and `end`, and does not
        come again after `end`. Its index is returned twice, as the end of one argument and the start of the
        next.
        """
        for found in self._patterns.next_argument.finditer(self._text, start, end) if missing else ():
            key = found["key"].strip()
            if key not in missing:
                continue
            missing = set(missing) - {key}
            later = self._patterns.argument.finditer(self._text, end)
            if all(each["key"].strip() != key for each in later):
                return found.start(), found.start()
        return None

    def _value_text(self, start: int, end: int) -> str:
        text = self._text[start:end]
        return text.removeprefix("\n").removesuffix("\n") if self._tags.single_line_ends else text
