"""Interface by which an answer is rendered in the response format of one API."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NotRequired, Protocol, TypeVar

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

T = TypeVar("T")

INLINE_LOGPROBS_MAX: Final = 4096
"""Most log-probabilities that are rendered at once in the event loop. That takes some milliseconds. More are
rendered in a thread."""

TextKind = type[ContentDelta] | type[ReasoningDelta]
Chunk = Mapping[str, Any]
"""JSON object that one event of a streamed response carries, in the format of one API."""


class AnswerHead(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: None


class UsageSoFar(TypedDict):
    usage: NotRequired[TokenUsage | None]


@dataclass(slots=True)
class Collected:
    """All deltas of one choice, collected for a reply that is not streamed."""

    choice: ChoiceAssembler
    deltas: list[Delta] = field(default_factory=list)
    shown_logprobs: list[Mapping[str, Any] | None] = field(default_factory=list)
    """Log-probabilities of each delta in the API's format. None for a delta without any."""

    @property
    def parts(self) -> list[AnswerPart] | None:
        """The choice's text split into content, reasoning and tool calls. None: the text is not parsed."""
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
        """Log-probabilities of all tokens of the choice, in the API's format. The lists of all deltas are
        joined, field by field. None: no delta has any."""
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
        """Text of the choice, without its reasoning and tool calls."""
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
    """Return the `usage` field of a chunk of one choice, or no field if the request asks for no usage. It is
    null if the request wants usage only at the end of the stream.

    `tokens`: number of output tokens of the choice so far. Cached prompt tokens are reported only at the end.
    """
    if not meaning.usage_at_end:
        return {}
    return {"usage": counted(len(choice.request.prompt), tokens) if meaning.usage_so_far else None}


class Rendering(Protocol):
    """Renderer of one reply in the response format of one API. Its methods return objects that can be written
    as JSON. It remembers how far a streamed reply has been rendered."""

    framing: Framing
    shows_logprobs: bool
    """Whether the client asked for log-probabilities of the output tokens."""

    def has_template(self, kind: TextKind) -> bool:
        """Return whether deltas that are only text of one kind can be rendered from one template, because
        their chunks differ only in the text. A delta without text then needs no chunk, and texts that come
        together need one. Once true, it stays true for a choice until a delta with something else is
        rendered."""

    def opening(self, choice: ChoiceAssembler) -> Sequence[Chunk]:
        """Return the chunks that are sent before the first delta of a choice, such as the one with
        the role."""

    def logprobs(self, delta: Delta) -> Mapping[str, Any] | None:
        """Return the log-probabilities of a delta in the API's format, or None if the client did not ask for
        them."""

    def chunks(self, choice: ChoiceAssembler, delta: Delta) -> Sequence[Chunk]:
        """Return the chunks (JSON objects) that show a delta of a choice to the client. Empty if the delta
        has nothing to show yet."""

    def closing(self, usage: Usage) -> Sequence[Chunk]:
        """Return the chunks that are sent after the last choice has finished, such as the one with
        token usage."""

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        """Return the chunks that report an error and end a stream before its answer is complete."""

    def whole(self, parts: Sequence[Collected], usage: Usage) -> Mapping[str, Any]:
        """Return the whole reply as one JSON object, for a request without streaming.

        `parts`: the choices to return. `usage`: token counts of the request.
        """


async def render(work: Callable[[], T], entries: int) -> T:
    """Return the result of `work`, which renders a part of a response. `entries`: number of log-probabilities
    that it renders. More than INLINE_LOGPROBS_MAX are rendered in a thread, so that other requests do not
    wait."""
    if entries <= INLINE_LOGPROBS_MAX:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


def best_of(drawn: Sequence[Collected], count: int) -> list[Collected]:
    """Return the `count` best choices of one prompt, beginning with the best. Equally good choices stay in
    their order.

    The best choice has the highest mean log-probability per token, which is OpenAI's rule. The mean does not
    favour short answers.
    """
    return sorted(drawn, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(part: Collected) -> float:
    known = [token.logprob for token in part.tokens if token.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")
