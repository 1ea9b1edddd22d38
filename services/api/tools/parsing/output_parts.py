"""Parts of a model's answer: content, reasoning and tool calls.

Pure.
"""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments, by the name of each tool that may be called."""


class ContentDelta(NamedTuple):
    """Content."""

    text: str


class ReasoningDelta(NamedTuple):
    """Reasoning."""

    text: str


class CompleteToolCall(NamedTuple):
    """A tool call that is whole."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCallStart(NamedTuple):
    """A tool call whose arguments follow."""

    name: str


class ToolCallDelta(NamedTuple):
    """More arguments of the tool call that was begun last."""

    arguments: str
    """What comes to its JSON."""


OutputPart = ContentDelta | ReasoningDelta | CompleteToolCall | ToolCallStart | ToolCallDelta


class MalformedToolCall(ValueError):
    """A text between the marks of a call is none."""


class AnswerParser(Protocol):
    """What hears one answer."""

    malformed_calls: int
    """Calls that could not be read, and are text."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is a thought, as far as it is known."""

    def push(self, text: str) -> list[OutputPart]:
        """What is certain with the next piece of the text."""

    def flush(self) -> list[OutputPart]:
        """What was held back. The end."""


_JOINED: Final[Mapping[type[OutputPart], Callable[[str], OutputPart]]] = {
    ContentDelta: ContentDelta,
    ReasoningDelta: ReasoningDelta,
    ToolCallDelta: ToolCallDelta,
}


def merge_parts(parts: list[OutputPart]) -> list[OutputPart]:
    """Neighbours of one kind are one part."""
    merge_parts: list[OutputPart] = []
    for kind, alike in groupby(parts, type):
        if (made := _JOINED.get(kind)) is not None:
            merge_parts.append(made("".join(part[0] for part in alike)))
        else:
            merge_parts += alike
    return merge_parts
