"""Parts of a model's answer: content, reasoning and tool calls.

Pure.
"""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments of each tool that may be called, by the tool's name."""


class ContentDelta(NamedTuple):
    """More content."""

    text: str


class ReasoningDelta(NamedTuple):
    """More reasoning."""

    text: str


class CompleteToolCall(NamedTuple):
    """A tool call that is complete."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCallStart(NamedTuple):
    """A tool call whose arguments follow."""

    name: str


class ToolCallDelta(NamedTuple):
    """More arguments of the tool call that was started last."""

    arguments: str
    """The next characters of a JSON object."""


OutputPart = ContentDelta | ReasoningDelta | CompleteToolCall | ToolCallStart | ToolCallDelta


class MalformedToolCall(ValueError):
    """A text between the marks of a tool call is no call."""


class AnswerParser(Protocol):
    """Parser of one answer."""

    malformed_calls: int
    """Calls that could not be parsed, and are content."""

    @property
    def thinking(self) -> bool:
        """Whether the text that comes next is reasoning, as far as it is known."""

    def push(self, text: str) -> list[OutputPart]:
        """Return the parts that are certain with the next piece of the text."""

    def flush(self) -> list[OutputPart]:
        """Return the parts that were held back. The answer ends."""


_MERGED: Final[Mapping[type[OutputPart], Callable[[str], OutputPart]]] = {
    ContentDelta: ContentDelta,
    ReasoningDelta: ReasoningDelta,
    ToolCallDelta: ToolCallDelta,
}


def merge_parts(parts: list[OutputPart]) -> list[OutputPart]:
    """Return the parts with neighbours of one kind as one part."""
    merged: list[OutputPart] = []
    for kind, alike in groupby(parts, type):
        if (made := _MERGED.get(kind)) is not None:
            merged.append(made("".join(part[0] for part in alike)))
        else:
            merged += alike
    return merged
