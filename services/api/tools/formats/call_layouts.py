"""Layouts in which a grammar writes tool calls, for formats whose calls can be constrained.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NAME: Final = "\0name"
ARGUMENTS: Final = "\0arguments"


@dataclass(frozen=True, slots=True)
class JsonCallLayout:
    """Layout of one call whose arguments are a JSON object."""

    parts: tuple[str, ...]
    """Marks and texts in order, with NAME and ARGUMENTS among them. The first one starts a call."""
    in_messages: bool = False
    """All of an answer is messages with heads, and a call is the last of them (gpt-oss)."""
    is_unmarked: bool = False
    """The first part is no mark: an answer that begins with it is a call."""

    @property
    def mark(self) -> str:
        return self.parts[0]


@dataclass(frozen=True, slots=True)
class ArgumentLayout:
    """Layout of one call whose arguments are written one by one, each behind its name."""

    mark: str
    before: str
    """Text between the mark and the tool's name."""
    behind: str
    """Text between the tool's name and the arguments."""
    key: tuple[str, str]
    """Texts around the name of an argument."""
    ends: str = ""
    """Text behind each argument."""
    between: str = ""
    """Text between two arguments."""
    after: tuple[str, ...] = ()
    """Marks and texts behind the last argument."""
    text: tuple[str, str] | None = None
    """Marks around an argument of type string. None if such an argument is a JSON string."""
    quotes: bool = True
    """An argument of type string may be a JSON string, too."""
    list_end: str = ""
    """End of the list in which all calls of an answer stand. Empty if each call has its own mark."""

    @property
    def is_unmarked(self) -> bool:
        return bool(self.list_end)


CallLayouts = JsonCallLayout | Sequence[ArgumentLayout] | None
"""Layout of a format's calls: JSON, the variants of arguments one by one, or None if nothing constrains
them."""


def argument_layout(layouts: CallLayouts, template: str) -> ArgumentLayout | None:
    """Return the variant that a chat template writes, or None if its calls cannot be constrained."""
    if layouts is None or isinstance(layouts, JsonCallLayout):
        return None
    return next((each for each in layouts if each.mark in template or each.is_unmarked), None)
