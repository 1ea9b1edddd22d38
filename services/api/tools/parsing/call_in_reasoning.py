"""Texts within a model's reasoning that may be tool calls.

No I/O, clock or threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from baton.api.tools.parsing.output_parts import AnswerParser, CompleteToolCall, OutputPart

IN_REASONING_MAX: Final = 8
"""Most marks of tool calls (such as `<tool_call>`) in one answer's reasoning that may turn out to be plain
text. Later ones are taken as text at once."""


class CallParser(AnswerParser, Protocol):
    """Interface of an answer parser that also tells whether its text ends within a JSON string."""

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends within a JSON string of a tool call, where a mark such as `</think>`
        is plain text."""


@dataclass(slots=True)
class CallInReasoning:
    """A text within the model's reasoning that begins like a tool call.

    If the answer ends after it, it is a tool call. If the reasoning goes on, it is part of the reasoning.
    """

    mark: str
    parser: CallParser
    text: list[str] = field(default_factory=list)
    parts: list[OutputPart] = field(default_factory=list)
    failed: bool = False
    """Whether the text turned out to be no tool call, or to go on after one with other text."""

    def push(self, text: str) -> None:
        self.text.append(text)
        self._add(self.parser.push(text))

    def flush(self) -> None:
        self._add(self.parser.flush())

    def _add(self, parts: Sequence[OutputPart]) -> None:
        self.parts += parts
        others = any(not isinstance(part, CompleteToolCall) for part in parts)
        self.failed = self.failed or others or self.parser.malformed_calls > 0
