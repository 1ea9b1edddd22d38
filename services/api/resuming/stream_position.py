"""Position in a streamed answer, as a text in the id of an event (`stream-is-prefix`).

    12-9f3c           the events of the first 12 tokens were sent.

    12-9f3c+2         So were 2 events of the token after them.

    12-9f3c_9-1aa     Of two choices, 12 and 9 tokens were sent.

    14-c0de~1         All tokens were sent, and 1 event after them.

    14-c0de~end       The whole stream was sent.

A position counts tokens, so it does not depend on the times at which they came. The number after the dash is
a checksum of the token ids. If an answer is computed again with another result, the checksums differ.

No I/O, clock or threads.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple
from zlib import crc32

from baton.rooms.request import Token

CHECKED_MAX: Final = 8
"""Most choices of a stream whose positions have checksums. With more, ids would be long."""
END: Final = "end"
BEGINNING: Final = b"0-0"
CHOICE: Final = re.compile(r"(\d{1,8})(?:-([0-9a-f]{1,4}))?(?:\+(\d{1,6}))?")
ALL: Final = 2**31
"""Number of events to leave out that leaves out every event of a token."""


class ChoicePosition(NamedTuple):
    """Position in one choice."""

    tokens: int
    """Number of tokens whose events were all sent."""
    check: int | None = None
    """Checksum of the ids of these tokens. None: it is not known."""
    events: int = 0
    """Number of events of the next token that were sent."""

    def text(self) -> bytes:
        checked = "" if self.check is None else f"-{self.check:x}"
        within = f"+{self.events}" if self.events else ""
        return f"{self.tokens}{checked}{within}".encode()


class StreamPosition(NamedTuple):
    """Position in a streamed answer."""

    choices: tuple[ChoicePosition, ...]
    closing: int = 0
    """Number of events after the last token that were sent."""
    is_end: bool = False
    """Whether the whole stream was sent."""


class PositionWriter:
    """Writer of the positions of one stream."""

    __slots__ = ("_checks", "_counts", "_is_checked", "_last", "_sent", "_texts", "_width")

    def __init__(self, choices: int, sent: StreamPosition | None = None) -> None:
        """Start at the first token. `choices`: number of choices of the stream, of all prompts. `sent`:
        position up to which a client already has the events of a resumed stream. A choice stays there until
        its tokens are past it."""
        self._counts = [0] * choices
        self._checks = [0] * choices
        self._is_checked = choices <= CHECKED_MAX
        self._sent = None if sent is None else sent.choices
        self._texts = [BEGINNING if self._is_checked else b"0"] * choices
        if sent is not None:
            self._texts = [each.text() for each in sent.choices]
        self._last = self._texts[0]
        """Position of the choice whose token was added last, before that token."""
        self._width = choices

    def add(self, choice: int, tokens: Sequence[Token]) -> int:
        """Move on by `tokens`, and return the number of tokens of the choice. No tokens stand for one that is
        not shown."""
        count = self._counts[choice] = self._counts[choice] + (len(tokens) or 1)
        if self._is_checked:
            check = self._checks[choice]
            for token in tokens:
                check = crc32(token.id.to_bytes(4, "big"), check)
            self._checks[choice] = check
            text = b"%d-%x" % (count, check & 0xFFFF)
        else:
            text = b"%d" % count
        last = self._texts[choice]
        if self._sent is not None:
            if count <= self._sent[choice].tokens:
                return count
            last = last.partition(b"+")[0]
        self._last, self._texts[choice] = last, text
        return count

    def check(self, choice: int) -> int | None:
        """Return the checksum of the choice's tokens, or None if positions have none."""
        return self._checks[choice] & 0xFFFF if self._is_checked else None

    def text(self) -> bytes:
        """Return the position after all events of the tokens so far."""
        return self._texts[0] if self._width == 1 else b"_".join(self._texts)

    def within(self, choice: int, events: int) -> bytes:
        """Return the position within the events of the token that was added last. `events`: how many of them
        were sent."""
        before = b"%b+%d" % (self._last, events)
        if self._width == 1:
            return before
        return b"_".join((*self._texts[:choice], before, *self._texts[choice + 1 :]))

    def closing(self, events: int, *, last: bool) -> bytes:
        """Return the position after `events` events behind the last token. `last`: the stream has ended."""
        return b"%b~%b" % (self.text(), END.encode() if last else b"%d" % events)


def parse_position(text: str) -> StreamPosition | None:
    """Return the position that `text` holds, or None if it holds none."""
    before, _, after = text.partition("~")
    found = [CHOICE.fullmatch(each) for each in before.split("_")]
    if (after and after != END and not after.isdecimal()) or len(after) > len(END):
        return None
    choices = []
    for each in found:
        if each is None:
            return None
        tokens, check, events = each.groups()
        checksum = None if check is None else int(check, 16)
        choices.append(ChoicePosition(int(tokens), checksum, int(events or 0)))
    is_end = after == END
    return StreamPosition(tuple(choices), 0 if is_end else int(after or 0), is_end)


class Replay:
    """Decides which events of a computed answer the client of a resumed stream already has."""

    __slots__ = ("_left", "_position")

    def __init__(self, position: StreamPosition) -> None:
        self._position = position
        self._left = len(position.choices)

    @property
    def is_over(self) -> bool:
        """Whether every choice is past its position."""
        return self._left == 0

    def events_sent(self, choice: int, tokens: int) -> int:
        """Return how many leading events of a token were sent before; ALL for all of them. `tokens`: number
        of the choice's tokens, up to this one."""
        now = self._position.choices[choice]
        if tokens <= now.tokens:
            return ALL
        if tokens > now.tokens + 1:
            return 0
        self._left -= 1
        return now.events

    def differs(self, choice: int, tokens: int, check: int | None, *, ended: bool) -> bool:
        """Return whether the choice is another one than the client has: it has other tokens, or fewer.

        `tokens`, `check`: number and checksum of the tokens so far. `ended`: whether it has ended.
        """
        now = self._position.choices[choice]
        if tokens == now.tokens:
            return None not in (check, now.check) and check != now.check
        return ended and tokens < now.tokens
