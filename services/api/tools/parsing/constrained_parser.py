"""Parser of a tool call that a grammar constrains, while the model is writing it.

Each character of such a call is certain: the tool as soon as its name is complete, and then each character of
the arguments, which are JSON. So the call can be streamed as it grows, and a string may contain a closing
mark.

No I/O, clock or threads.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Texts around the name and the arguments of a tool call that a grammar constrains."""

    mark: str
    """Opening mark of the tool call. Empty if the call begins with the text `before`."""
    before: str
    """Literal text between the opening mark of a tool call and the tool's name."""
    between: str
    """Literal text between the tool's name and the arguments of a tool call."""
    after: str
    """Literal text after the arguments, which ends a tool call in formats without a closing mark."""

    def parser(self, names: Collection[str]) -> "ConstrainedCallParser":
        """Return a parser for one tool call in this layout. `names`: names of the tools that it may call."""
        return ConstrainedCallParser(
            {f"{self.before}{name}{self.between}": name for name in names}, self.after
        )


class ConstrainedCallParser:
    """Parser of one constrained tool call that the model is writing."""

    def __init__(self, heads: Mapping[str, str], after: str) -> None:
        """Create the parser of a tool call whose opening mark was already parsed.

        `heads`: names of the tools that may be called, by the literal text that comes before their arguments.
        `after`: literal text that follows the arguments.
        """
        self._heads = heads
        self._left = after
        self._head = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._whole = False
        self.name: str | None = None
        """Name of the called tool. None until the text before the arguments is complete."""
        self.has_failed = False
        """Whether the text turned out not to be a tool call in the expected layout."""

    @property
    def arguments_end(self) -> bool:
        return self._whole

    @property
    def ends(self) -> bool:
        """Whether the tool call is complete, except for its closing mark."""
        return self._whole and not self._left

    def take(self, text: str) -> tuple[int, str]:
        """Parse the next text of the tool call.

        Returns the number of characters of `text` that belong to the call, and the part of the arguments
        among them.
        """
        at = 0
        if not self._depth and not self._whole:
            at = self._take_head(text)
            if self.has_failed or at == len(text):
                return at, ""
            if text[at] != "{":
                self.has_failed = True
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
        """Parse the text up to the start of the arguments, which holds the tool's name. Return the number of
        characters taken from `text`."""
        at = 0
        while self._head not in self._heads and at < len(text):
            self._head, at = self._head + text[at], at + 1
            if not any(head.startswith(self._head) for head in self._heads):
                self.has_failed = True
                break
        return at

    def _end_of_arguments(self, text: str, at: int) -> int:
        for index in range(at, len(text)):
            char = text[index]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._whole = True
                    return index + 1
        return len(text)
