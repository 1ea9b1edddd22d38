"""What of a call is certain while its text still comes, where a grammar holds the answer to its calls?

All: whose it is as soon as its name is there, and each letter of its arguments, which are JSON then. So it
can be told as it grows, and a mark of its end may stand within a text of it.

Pure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLayout:
    """How a grammar has a call written."""

    mark: str
    """That begins it; "" where its first letter does."""
    before: str
    """Between the mark and the name."""
    between: str
    """The name and the arguments."""
    after: str
    """Behind the arguments, where no mark tells the end."""

    def of_any(self, names: Collection[str]) -> "ConstrainedCallParser":
        """One of these names."""
        return ConstrainedCallParser(
            {f"{self.before}{name}{self.between}": name for name in names}, self.after
        )


class ConstrainedCallParser:
    """One that is being written."""

    def __init__(self, heads: Mapping[str, str], after: str) -> None:
        """`heads`: the name that it has, by what stands before its arguments. `after`: of its shape."""
        self._heads = heads
        self._left = after
        self._head = ""
        self._depth = 0
        self._in_text = False
        self._escaped = False
        self._whole = False
        self.name: str | None = None
        """Once its arguments have begun."""
        self.is_none = False
        """It is not written so."""

    @property
    def arguments_end(self) -> bool:
        return self._whole

    @property
    def ends(self) -> bool:
        """All of it was there, but for a mark of its end."""
        return self._whole and not self._left

    def take(self, text: str) -> tuple[int, str]:
        """How much of what comes next is of it, and what that adds to its arguments."""
        at = 0
        if not self._depth and not self._whole:
            at = self._take_head(text)
            if self.is_none or at == len(text):
                return at, ""
            if text[at] != "{":
                self.is_none = True
                return at, ""
            self.name = self._heads[self._head]
        end = at if self._whole else self._end_of_arguments(text, at)
        stop = end
        while self._whole and self._left and stop < len(text):
            if text[stop] != self._left[0]:
                self._left = ""
                break
            self._left, stop = self._left[1:], stop + 1
        return stop, text[at:end]

    def _take_head(self, text: str) -> int:
        """How much of the text belongs before the arguments."""
        at = 0
        while self._head not in self._heads and at < len(text):
            self._head, at = self._head + text[at], at + 1
            if not any(head.startswith(self._head) for head in self._heads):
                self.is_none = True
                break
        return at

    def _end_of_arguments(self, text: str, at: int) -> int:
        for place in range(at, len(text)):
            char = text[place]
            if self._in_text:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_text = False
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._whole = True
                    return place + 1
        return len(text)
