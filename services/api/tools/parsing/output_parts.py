"""Parts of a model's answer: content, reasoning and tool calls.

No I/O, clock or threads.
"""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments of each tool that may be called, by the tool's name."""


class ContentDelta(NamedTuple):
    """Next piece of an answer's content, as a part of the parsed answer."""

    text: str


class ReasoningDelta(NamedTuple):
    """Next piece of the model's reasoning, as a part of the parsed answer."""

    text: str


class CompleteToolCall(NamedTuple):
    """A complete tool call, as a part of a parsed answer."""

    name: str
    arguments: str
    """Arguments of the tool call, as the text of a JSON object."""


class ToolCallStart(NamedTuple):
    """Start of a tool call in an answer. Its arguments follow as ToolCallDelta."""

    name: str


class ToolCallDelta(NamedTuple):
    """Next piece of the arguments of the tool call that was started last."""

    arguments: str
    """Next piece of the arguments of a tool call. All pieces of a call join to the text of a JSON object."""


OutputPart = ContentDelta | ReasoningDelta | CompleteToolCall | ToolCallStart | ToolCallDelta


class MalformedToolCall(ValueError):
    """Error: a text between the marks of a tool call cannot be parsed as a tool call."""


class AnswerParser(Protocol):
    """Interface of a parser that splits one answer into content, reasoning and tool calls."""

    malformed_calls: int
    """Number of tool calls that could not be parsed, and became content."""

    @property
    def thinking(self) -> bool:
        """Whether the text that comes next is reasoning, as far as it is known."""

    def push(self, text: str) -> list[OutputPart]:
        """Take the next piece of the answer's text, and return the parts that are certain now."""

    def flush(self) -> list[OutputPart]:
        """End the answer, and return its remaining parts, which were held back until now."""


_MERGED: Final[Mapping[type[OutputPart], Callable[[str], OutputPart]]] = {
    ContentDelta: ContentDelta,
    ReasoningDelta: ReasoningDelta,
    ToolCallDelta: ToolCallDelta,
}


def merge_parts(parts: list[OutputPart]) -> list[OutputPart]:
    """Return the parts of an answer in which consecutive parts of one type (such as two pieces of content)
    are joined."""
    merged: list[OutputPart] = []
    for kind, alike in groupby(parts, type):
        if (made := _MERGED.get(kind)) is not None:
            merged.append(made("".join(part[0] for part in alike)))
        else:
            merged += alike
    return merged
