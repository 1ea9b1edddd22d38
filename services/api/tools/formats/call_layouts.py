"""Layouts of tool calls as a grammar writes them, for the formats whose tool calls can be constrained.

No I/O, clock or threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NAME: Final = "\0name"
ARGUMENTS: Final = "\0arguments"


@dataclass(frozen=True, slots=True)
class JsonCallLayout:
    """Layout of one tool call whose arguments are a JSON object."""

    parts: tuple[str, ...]
    """Parts of a tool call in the order in which they are written: marks, texts, and NAME and ARGUMENTS for
    the tool's name and arguments."""
    in_messages: bool = False
    """Whether an answer in this format (gpt-oss) is a list of messages with headers, of which a tool call is
    the last."""
    is_unmarked: bool = False
    """Whether the first of `parts` is plain text and not a mark. An answer that begins with this text is then
    a tool call."""

    @property
    def mark(self) -> str:
        return self.parts[0]


@dataclass(frozen=True, slots=True)
class ArgumentLayout:
    """Layout of one tool call whose arguments are written one by one, each after its name."""

    mark: str
    before: str
    """Literal text between the opening mark of a tool call and the tool's name."""
    behind: str
    """Literal text between the tool's name and the first argument of a tool call."""
    key: tuple[str, str]
    """Literal texts before and after the name of an argument."""
    ends: str = ""
    """Literal text after each argument of a tool call."""
    between: str = ""
    """Literal text between two arguments of a tool call."""
    after: tuple[str, ...] = ()
    """Marks and literal texts after the last argument of a tool call, in order."""
    text: tuple[str, str] | None = None
    """Marks before and after an argument of type string, in place of quotes. None if it is a JSON string."""
    quotes: bool = True
    """Whether an argument of type string may also be written as a JSON string."""
    list_end: str = ""
    """Literal text that ends the list of all tool calls in an answer. Empty if each call has its own mark."""

    @property
    def is_unmarked(self) -> bool:
        return bool(self.list_end)


CallLayouts = JsonCallLayout | Sequence[ArgumentLayout] | None
"""Layout of a format's tool calls. It is one layout with JSON arguments, or several variants with arguments
written one by one. None if no grammar can constrain the calls."""


def argument_layout(layouts: CallLayouts, template: str) -> ArgumentLayout | None:
    """Return the layout with arguments written one by one that a chat template uses, or None."""
    if layouts is None or isinstance(layouts, JsonCallLayout):
        return None
    return next((each for each in layouts if each.mark in template or each.is_unmarked), None)
