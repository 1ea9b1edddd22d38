"""Parts of a model's answer: content, reasoning and tool calls.

Pure.
"""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments, by the name of each tool that may be called."""


class Said(NamedTuple):
    """Content."""

    text: str


class Thought(NamedTuple):
    """Reasoning."""

    text: str


class Call(NamedTuple):
    """A tool call that is whole."""

    name: str
    arguments: str
    """A JSON object."""


class CallBegun(NamedTuple):
    """A tool call whose arguments follow."""

    name: str


class CallGrown(NamedTuple):
    """More arguments of the tool call that was begun last."""

    arguments: str
    """What comes to its JSON."""


Part = Said | Thought | Call | CallBegun | CallGrown


class Unreadable(ValueError):
    """A text between the marks of a call is none."""


class Voice(Protocol):
    """What hears one answer."""

    unread: int
    """Calls that could not be read, and are text."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is a thought, as far as it is known."""

    def push(self, text: str) -> list[Part]:
        """What is certain with the next piece of the text."""

    def flush(self) -> list[Part]:
        """What was held back. The end."""


_JOINED: Final[Mapping[type[Part], Callable[[str], Part]]] = {
    Said: Said,
    Thought: Thought,
    CallGrown: CallGrown,
}


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind are one part."""
    joined: list[Part] = []
    for kind, alike in groupby(parts, type):
        if (made := _JOINED.get(kind)) is not None:
            joined.append(made("".join(part[0] for part in alike)))
        else:
            joined += alike
    return joined
