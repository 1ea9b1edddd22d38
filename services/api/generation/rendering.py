"""What does whoever drives an answer need from the shape it is rendered in?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.api.errors import ApiError
from baton.api.generation.answer_stream import Usage, counted
from baton.api.generation.choice_assembler import Called, ChoiceAssembler, Delta, Told, whole_calls
from baton.api.http.event_stream import Framing
from baton.api.requests.schemas import StreamOptions
from baton.api.tools.parsing.output_parts import ContentDelta, ReasoningDelta
from baton.rooms.request import FinishReason, Token


@dataclass(slots=True)
class Collected:
    """A whole choice, for a reply that is not streamed."""

    choice: ChoiceAssembler
    texts: list[str] = field(default_factory=list)
    parts: list[Told] | None = None
    """Of the text, where it is told apart."""
    tokens: list[Token] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    """Of all tokens, as they are shown."""
    finish: FinishReason | None = None

    def add(self, delta: Delta, logprobs: dict[str, Any] | None) -> None:
        """`logprobs`: the delta's, whose lists go on where those of the deltas before it ended."""
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        if delta.parts is not None:
            self.parts = [*(self.parts or ()), *delta.parts]
        self.finish = delta.finish
        if self.logprobs is None or logprobs is None:
            self.logprobs = logprobs
            return
        for name, shown in logprobs.items():
            if shown is not None:
                self.logprobs[name] += shown

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def said(self) -> str:
        """Of the text, the answer."""
        if self.parts is None:
            return self.text
        return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))

    @property
    def thought(self) -> str:
        return "".join(part.text for part in self.parts or () if isinstance(part, ReasoningDelta))

    @property
    def called(self) -> list[Called]:
        return [part for part in whole_calls(self.parts or ()) if isinstance(part, Called)]


@dataclass(frozen=True, slots=True)
class UsageShown:
    """Where a stream tells how many tokens there are."""

    at_end: bool
    """After the last choice has finished."""
    so_far: bool
    """Beside what each choice says, too."""

    @staticmethod
    def of(options: StreamOptions | None) -> "UsageShown":
        asked = options or StreamOptions()
        return UsageShown(asked.include_usage, asked.include_usage and asked.continuous_usage_stats)

    def beside(self, choice: ChoiceAssembler, tokens: int) -> dict[str, Any]:
        """What a chunk of `choice` has of it, with so many tokens told of its answer; how much of its prompt
        was cached is told at the end."""
        if not self.at_end:
            return {}
        return {"usage": counted(len(choice.request.prompt), tokens) if self.so_far else None}


class Rendering(Protocol):
    """One reply in one API's shape. Every method returns JSON-ready data. What is kept is what a stream has
    shown so far."""

    framing: Framing

    @property
    def text_alone(self) -> bool:
        """The chunks of a delta that does not finish show its text and nothing else of it; none without
        text. True stays true for a choice until a delta of it has something else."""

    def opening(self, choice: ChoiceAssembler) -> list[dict[str, Any]]:
        """The chunks that come before a choice's first delta, and tell nothing of it."""

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """A delta's log-probabilities, if the caller asked for them."""

    def chunks(self, choice: ChoiceAssembler, delta: Delta) -> list[dict[str, Any]]:
        """A delta's chunks; none if it has nothing to show yet."""

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The chunks after the last choice has finished."""

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """The chunks that end a stream which breaks off."""

    def whole(self, parts: Sequence[Collected], usage: Usage) -> dict[str, Any]:
        """The reply that is not streamed."""
