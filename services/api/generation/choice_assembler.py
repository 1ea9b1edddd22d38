"""One choice of an answer, as its tokens come in: text, parts, finish.

Everything here depends on the tokens alone, not on how they were batched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from typing_extensions import TypedDict

from baton.api.backend import TokenBatch
from baton.api.generation.prompt_echo import PromptEcho
from baton.api.requests.meaning import Meaning
from baton.api.text.detokenizer import Detokenizer
from baton.api.text.stop_strings import StopStrings
from baton.api.tools.parsing.output_parts import (
    AnswerParser,
    CompleteToolCall,
    ContentDelta,
    OutputPart,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
    merge_parts,
)
from baton.rooms.request import FinishReason, Request, Token

OutputFinish = Literal["stop", "length"]
"""Finish reason of text."""
Finish = Literal["stop", "length", "tool_calls"]


class StopFields(TypedDict):
    stop_reason: int | str | None
    matched_stop: int | str | None


class AnsweredCall(NamedTuple):
    """A whole tool call of the answer."""

    place: int
    """Index among the answer's calls."""
    id: str
    name: str
    arguments: str


class AnsweredCallStart(NamedTuple):
    """The start of a tool call, whose arguments follow."""

    place: int
    id: str
    name: str


class AnsweredCallDelta(NamedTuple):
    """More arguments of the call that was begun last."""

    place: int
    arguments: str
    """The new text. All of a call joins to JSON, unless the answer is cut off."""


AnswerPart = ContentDelta | ReasoningDelta | AnsweredCall | AnsweredCallStart | AnsweredCallDelta


def whole_calls(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Return the parts, with each call in one piece."""
    whole: list[AnswerPart] = []
    for part in parts:
        match part, whole[-1] if whole else None:
            case AnsweredCallStart(place, id_, name), _:
                whole.append(AnsweredCall(place, id_, name, ""))
            case AnsweredCallDelta(place, more), AnsweredCall(open_, id_, name, arguments) if place == open_:
                whole[-1] = AnsweredCall(place, id_, name, arguments + more)
            case _:
                whole.append(part)
    return whole


@dataclass(frozen=True, slots=True)
class AnswerParsing:
    """How one choice's text is parsed into content, reasoning and calls."""

    parser: AnswerParser
    marks: Mapping[int, str]
    """Special tokens that the parser needs to see, by id."""
    name_call: Callable[[str, int], str]
    """Makes the id of a call from the tool's name and the number of calls before it."""
    calls_max: int | None = None
    ends_by_calls: bool = True
    """Whether calls give the finish reason. They do not if the request forces one tool."""
    shows_reasoning: bool = True
    streams_reasoning: bool = True
    """Whether reasoning comes as it grows. Else it comes when it has ended."""
    counts_reasoning: bool = False
    """Whether reasoning can be separated from the answer at all."""


@dataclass(slots=True)
class Delta:
    """What one batch of tokens adds to a choice."""

    text: str = ""
    tokens: Sequence[Token] = ()
    """All tokens that count, including those of a stop string and an end-of-sequence token."""
    offsets: list[int] = field(default_factory=list)
    """Characters of output before each token."""
    finish: FinishReason | None = None
    parts: Sequence[AnswerPart] | None = None
    """Parts of the text. None: all of it is content."""
    echo: PromptEcho | None = None
    """The prompt whose text the text begins with. Only a choice's first delta has it."""

    @property
    def entries(self) -> int:
        """Number of log-probabilities that are shown, without each token's own."""
        prompt = 0 if self.echo is None else self.echo.entries
        return prompt + sum(len(token.top) for token in self.tokens)

    @property
    def only_content(self) -> str | None:
        """The text if all of it is content, else None."""
        if self.parts is None:
            return self.text
        if all(isinstance(part, ContentDelta) for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))
        return None


class ChoiceAssembler:
    """One choice. Feed it batches until a delta has a `finish`."""

    __slots__ = (
        "_begun",
        "_chars",
        "_detokenizer",
        "_ended_by",
        "_growing",
        "_include_stop",
        "_may_stop",
        "_min_tokens",
        "_parsing",
        "_parts",
        "_stopped_by",
        "_stops",
        "calls",
        "echo",
        "finish",
        "index",
        "output_tokens",
        "reasoning_tokens",
        "request",
    )

    def __init__(
        self,
        index: int,
        request: Request,
        meaning: Meaning,
        detokenizer: Detokenizer,
        parsing: AnswerParsing | None = None,
        echo: PromptEcho | None = None,
    ) -> None:
        """`detokenizer`: a fresh one behind the prompt. `parsing`: None if the text is not parsed. `echo`:
        None if nothing of the prompt is shown."""
        self.index = index
        self.request = request
        self.output_tokens = 0
        self.finish: FinishReason | None = None
        """Finish reason, once the last delta was passed on."""
        self.calls = 0
        """Number of tool calls."""
        self.reasoning_tokens = 0
        self._parsing = parsing
        self._growing: int | None = None
        """Index of the call whose arguments are growing, if it is passed on."""
        self._parts: list[OutputPart] = []
        self._min_tokens = request.min_tokens
        self._include_stop = meaning.includes_stop
        self._detokenizer = detokenizer
        self._stopped_by: int | None = None
        self._ended_by: int | None = None
        self._stops = StopStrings(meaning.stop, include=self._include_stop)
        self._may_stop = bool(meaning.stop)
        self.echo = echo
        self._begun = False
        self._chars = 0 if echo is None else len(echo.text or "")

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the choice, not the backend."""
        return self._stops.matched is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice."""
        return self._stops.matched

    @property
    def counts_reasoning(self) -> bool:
        return self._parsing is not None and self._parsing.counts_reasoning

    @property
    def malformed_calls(self) -> int:
        """Number of calls that stayed text because they could not be parsed."""
        return 0 if self._parsing is None else self._parsing.parser.malformed_calls

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop id of the request that ended the choice, or None."""
        return self._stopped_by if self._stops.matched is None else self._stops.matched

    @property
    def ended_by(self) -> StopFields:
        """What ended the choice, in vLLM's and SGLang's fields. None before the end."""
        return {"stop_reason": self.stop_reason, "matched_stop": self.matched_stop}

    @property
    def matched_stop(self) -> str | int | None:
        """The same in SGLang's sense, which includes end-of-sequence tokens."""
        return self._ended_by if self.stop_reason is None else self.stop_reason

    def reason(self, finish: FinishReason) -> Finish:
        """Return the finish reason for the caller."""
        if finish is not FinishReason.STOP:
            return "length"
        ends = self.calls and self._parsing is not None and self._parsing.ends_by_calls
        return "tool_calls" if ends else "stop"

    def take(self, batch: TokenBatch) -> Delta:
        """Add the next batch and return what it adds. Tokens after a completed stop string are dropped."""
        echo = self.echo
        if echo is None or self._begun:
            return self._output(batch)
        self._begun = True
        if batch.scores:
            echo.scores = batch.scores
        if echo.text is None:
            return self._output(batch)
        delta = Delta(finish=FinishReason.LENGTH) if echo.is_alone else self._output(batch)
        delta.text, delta.echo = echo.text + delta.text, echo
        if delta.parts is not None:
            delta.parts = [ContentDelta(echo.text), *delta.parts]
        return delta

    def _output(self, batch: TokenBatch) -> Delta:
        tokens, finish = batch.tokens, batch.finish
        shown = len(tokens) - (finish is FinishReason.STOP and not self._include_stop)
        texts: list[str] = []
        offsets: list[int] = []
        for count, token in enumerate(tokens, 1):
            offsets.append(self._chars)
            self.output_tokens += 1
            if count > shown:
                break
            if self._parsing is not None:
                self.reasoning_tokens += self._parsing.parser.thinking
            texts.append(self._parsed(self._released(self._text_of(token.id))))
            if self.stopped:
                return Delta("".join(texts), tokens[:count], offsets, FinishReason.STOP, self._ended())
        if finish is None:
            return Delta("".join(texts), tokens, offsets, parts=self._certain())
        texts.append(self._parsed(self._released(self._detokenizer.flush())))
        if self._parsing is None:
            texts.append(self._stops.flush())
        parts = self._ended()
        if self.stopped:
            finish = FinishReason.STOP
        elif finish is FinishReason.STOP:
            self._ended_by = tokens[-1].id
            if self._ended_by in self.request.stop_token_ids:
                self._stopped_by = self._ended_by
        return Delta("".join(texts), tokens, offsets, finish, parts)

    def _text_of(self, id_: int) -> str:
        """Return the text that is certain with this token. Special tokens are text only for the parser."""
        if self._parsing is None or (mark := self._parsing.marks.get(id_)) is None:
            return self._detokenizer.push(id_)
        before = self._detokenizer.flush()
        return before + self._detokenizer.push(id_) + mark

    def _parsed(self, text: str) -> str:
        """Parse the text, and return it."""
        if self._parsing is not None and text:
            self._add(self._parsing.parser.push(text))
        return text

    def _add(self, parts: Sequence[OutputPart]) -> None:
        """Add parts up to a stop string. Stop strings count in content only, not in reasoning and calls."""
        for part in parts:
            if self.stopped:
                return
            if isinstance(part, ContentDelta):
                text = self._stops.push(part.text, armed=self.output_tokens > self._min_tokens)
            else:
                text = self._stops.flush()
            if text:
                self._parts.append(ContentDelta(text))
            if not isinstance(part, ContentDelta):
                self._parts.append(part)

    def _ended(self) -> Sequence[AnswerPart] | None:
        if self._parsing is not None:
            self._add(self._parsing.parser.flush())
            if text := self._stops.flush():
                self._parts.append(ContentDelta(text))
        return self._certain(ended=True)

    def _certain(self, *, ended: bool = False) -> Sequence[AnswerPart] | None:
        """Return the parts that were not returned yet."""
        parsing = self._parsing
        if parsing is None:
            return None
        if (
            not parsing.streams_reasoning
            and not ended
            and self._parts
            and isinstance(self._parts[-1], ReasoningDelta)
        ):
            return ()
        parts, self._parts = merge_parts(self._parts), []
        told: list[AnswerPart] = []
        for part in parts:
            match part:
                case ContentDelta() | ReasoningDelta():
                    if parsing.shows_reasoning or isinstance(part, ContentDelta):
                        told.append(part)
                case ToolCallDelta(arguments):
                    if self._growing is not None:
                        told.append(AnsweredCallDelta(self._growing, arguments))
                case _ if parsing.calls_max is not None and self.calls >= parsing.calls_max:
                    self._growing = None
                case ToolCallStart(name) | CompleteToolCall(name):
                    place, id_ = self.calls, parsing.name_call(name, self.calls)
                    if isinstance(part, CompleteToolCall):
                        told.append(AnsweredCall(place, id_, *part))
                        self._growing = None
                    else:
                        told.append(AnsweredCallStart(place, id_, name))
                        self._growing = place
                    self.calls += 1
        return told

    def _released(self, text: str) -> str:
        """Return what no stop string can claim any more."""
        self._chars += len(text)
        if not self._may_stop or self._parsing is not None:
            return text
        return self._stops.push(text, armed=self.output_tokens > self._min_tokens)
