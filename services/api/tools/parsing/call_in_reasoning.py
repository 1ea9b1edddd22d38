"""Possible tool calls within reasoning.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from baton.api.tools.parsing.output_parts import AnswerParser, CompleteToolCall, OutputPart

IN_REASONING_MAX: Final = 8
"""Most marks of calls in reasoning that turn out to be text. Later ones are text without a try."""


class CallParser(AnswerParser, Protocol):
    """Parser of an answer that knows whether a string is open."""

    @property
    def in_string(self) -> bool:
        """Whether a string of a call's JSON is open."""


@dataclass(slots=True)
class CallInReasoning:
    """A possible tool call within reasoning.

    It is a call if the answer ends behind it. It is part of the reasoning if the reasoning goes on.
    """

    mark: str
    parser: CallParser
    text: list[str] = field(default_factory=list)
    parts: list[OutputPart] = field(default_factory=list)
    failed: bool = False
    """The text is no call, or something else follows it."""

    def push(self, text: str) -> None:
        self.text.append(text)
        self._add(self.parser.push(text))

    def flush(self) -> None:
        self._add(self.parser.flush())

    def _add(self, parts: Sequence[OutputPart]) -> None:
        self.parts += parts
        others = any(not isinstance(part, CompleteToolCall) for part in parts)
        self.failed = self.failed or others or self.parser.malformed_calls > 0
