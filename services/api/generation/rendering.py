"""The interface between an answer and the format of the API that it is rendered in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol

from typing_extensions import TypedDict

from baton.api.errors import ApiError
from baton.api.generation.answer_stream import TokenUsage, Usage, counted
from baton.api.generation.choice_assembler import (
    AnsweredCall,
    AnswerPart,
    ChoiceAssembler,
    Delta,
    whole_calls,
)
from baton.api.http.event_stream import Framing
from baton.api.requests.meaning import Meaning
from baton.api.tools.parsing.output_parts import ContentDelta, ReasoningDelta
from baton.rooms.request import FinishReason, Token

Chunk = Mapping[str, Any]
"""Data of one event: one of the API's own types."""


class AnswerHead(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: None


class UsageSoFar(TypedDict):
    usage: NotRequired[TokenUsage | None]


@dataclass(slots=True)
class Collected:
    """A whole choice, for a reply that is not streamed."""

    choice: ChoiceAssembler
    deltas: list[Delta] = field(default_factory=list)
    shown_logprobs: list[Mapping[str, Any] | None] = field(default_factory=list)
    """Log-probabilities of each delta, as the API shows them."""

    @property
    def parts(self) -> list[AnswerPart] | None:
        """Parts of the text. None: it is not parsed."""
        parsed = [delta.parts for delta in self.deltas if delta.parts is not None]
        return [part for parts in parsed for part in parts] if parsed else None

    @property
    def tokens(self) -> list[Token]:
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def finish(self) -> FinishReason | None:
        return self.deltas[-1].finish if self.deltas else None

    @property
    def logprobs(self) -> Any:
        """Log-probabilities of all tokens: each of their lists continues the one of the delta before."""
        known = [each for each in self.shown_logprobs if each is not None]
        if not known:
            return None
        whole = dict(known[0])
        for each in known[1:]:
            for name, shown in each.items():
                if shown is not None:
                    whole[name] = [*whole[name], *shown]
        return whole

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def content(self) -> str:
        """The text without reasoning and calls."""
        parts = self.parts
        if parts is None:
            return self.text
        return "".join(part.text for part in parts if isinstance(part, ContentDelta))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts or () if isinstance(part, ReasoningDelta))

    @property
    def calls(self) -> list[AnsweredCall]:
        parts = self.parts
        return (
            [] if parts is None else [part for part in whole_calls(parts) if isinstance(part, AnsweredCall)]
        )


def usage_of_chunk(meaning: Meaning, choice: ChoiceAssembler, tokens: int) -> UsageSoFar:
    """Return what a chunk of `choice` shows of the usage, after `tokens` of its output. How much of the
    prompt was cached is shown at the end."""
    if not meaning.usage_at_end:
        return {}
    return {"usage": counted(len(choice.request.prompt), tokens) if meaning.usage_so_far else None}


class Rendering(Protocol):
    """One reply in the format of one API. Every method returns JSON-ready data, typed as the
    API's document describes it. Its state is what a stream
    has shown so far."""

    framing: Framing
    shows_logprobs: bool
    """Whether the caller asked for log-probabilities of the output."""

    @property
    def text_alone(self) -> bool:
        """Whether the chunks of an unfinished delta show only its text, and none without text. It stays
        true for a choice until one of its deltas has something else."""

    def opening(self, choice: ChoiceAssembler) -> Sequence[Chunk]:
        """Return the chunks before a choice's first delta."""

    def logprobs(self, delta: Delta) -> Mapping[str, Any] | None:
        """Return a delta's log-probabilities, if the caller asked for them."""

    def chunks(self, choice: ChoiceAssembler, delta: Delta) -> Sequence[Chunk]:
        """Return a delta's chunks; none if it has nothing to show yet."""

    def closing(self, usage: Usage) -> Sequence[Chunk]:
        """Return the chunks after the last choice has finished."""

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        """Return the chunks that end a stream which breaks off."""

    def whole(self, parts: Sequence[Collected], usage: Usage) -> Mapping[str, Any]:
        """Return the reply that is not streamed."""


def best_of(drawn: Sequence[Collected], count: int) -> list[Collected]:
    """Return the `count` best choices, the best first. Of two that are equally good, the earlier one comes
    first.

    The best are those with the highest mean log-probability over all their tokens, which is OpenAI's rule.
    Longer answers are not worse for it.
    """
    return sorted(drawn, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(part: Collected) -> float:
    known = [token.logprob for token in part.tokens if token.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")
