"""What does one choice of an answer say, as its tokens come in?

Everything here depends on the tokens alone, not on how they were batched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from baton.api.backend import TokenBatch
from baton.api.generation.prompt_echo import PromptEcho
from baton.api.requests.schemas import GenerationRequest
from baton.api.text.detokenizer import Detokenizer
from baton.api.text.stop_strings import StopStrings
from baton.api.text.tokenizer import Tokenizer
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

TOOL_CALLS: Final = "tool_calls"
"""Why an answer ended that calls tools, in OpenAI's words."""


class Called(NamedTuple):
    """A tool, by this answer."""

    place: int
    """Among the answer's calls."""
    id: str
    name: str
    arguments: str


class Begun(NamedTuple):
    """A call whose arguments follow as they come."""

    place: int
    id: str
    name: str


class Grown(NamedTuple):
    """The call that was begun last."""

    place: int
    arguments: str
    """What comes to them: all that came join to JSON, unless the answer is cut off."""


Told = ContentDelta | ReasoningDelta | Called | Begun | Grown


def whole_calls(parts: Sequence[Told]) -> list[Told]:
    """The parts, in which a call that came piece by piece is one."""
    whole: list[Told] = []
    for part in parts:
        match part, whole[-1] if whole else None:
            case Begun(place, id_, name), _:
                whole.append(Called(place, id_, name, ""))
            case Grown(place, more), Called(open_, id_, name, arguments) if place == open_:
                whole[-1] = Called(place, id_, name, arguments + more)
            case _:
                whole.append(part)
    return whole


@dataclass(frozen=True, slots=True)
class Heard:
    """How an answer's text is told apart."""

    voice: AnswerParser
    marks: Mapping[int, str]
    """Special tokens that it is told by."""
    name_call: Callable[[str, int], str]
    """The id of a call, by the tool's name and how many there were before it."""
    calls_max: int | None = None
    calls_end: bool = True
    """Calls are why it ended; they are not where one tool had to be called."""
    thoughts_shown: bool = True
    thoughts_whole: bool = False
    """Each comes once it has ended."""
    thoughts_told: bool = False
    """Whether they can be told from the answer at all."""


@dataclass(slots=True)
class Delta:
    """What one batch added to a choice."""

    text: str = ""
    tokens: Sequence[Token] = ()
    """All that count, those of a stop string or an end-of-sequence token included."""
    offsets: list[int] = field(default_factory=list)
    """For each token: how many characters of output came before it."""
    finish: FinishReason | None = None
    parts: Sequence[Told] | None = None
    """What the text is, where it is told apart; None: all of it is the answer."""
    beginning: PromptEcho | None = None
    """The prompt, whose text the text begins with; of a choice's first, where it is echoed."""

    @property
    def entries(self) -> int:
        """Log-probabilities that are told with it, beside each token's own."""
        prompt = 0 if self.beginning is None else self.beginning.entries
        return prompt + sum(len(token.top) for token in self.tokens)

    @property
    def said_alone(self) -> str | None:
        """The text of the answer; None if there is something else."""
        if self.parts is None:
            return self.text
        if all(isinstance(part, ContentDelta) for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))
        return None


class ChoiceAssembler:
    """One request's answer. Feed it batches until a delta has a `finish`."""

    __slots__ = (
        "_begun",
        "_chars",
        "_detokenizer",
        "_ended_by",
        "_growing",
        "_heard",
        "_include_stop",
        "_may_stop",
        "_min_tokens",
        "_parts",
        "_stopped_by",
        "_stops",
        "beginning",
        "calls",
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
        body: GenerationRequest,
        tokenizer: Tokenizer,
        heard: Heard | None = None,
        beginning: PromptEcho | None = None,
    ) -> None:
        """`beginning`: what is told of the prompt, if anything is."""
        self.index = index
        self.request = request
        self.output_tokens = 0
        self.finish: FinishReason | None = None
        """Once its last delta was passed on."""
        self.calls = 0
        """Of tools."""
        self.reasoning_tokens = 0
        self._heard = heard
        self._growing: int | None = None
        """The place of the call that grows, if it is passed on."""
        self._parts: list[OutputPart] = []
        self._min_tokens = request.min_tokens
        self._include_stop = body.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer.codec,
            request.prompt,
            skip_special_tokens=body.skip_special_tokens,
            alone=tokenizer.alone,
        )
        self._stopped_by: int | None = None
        self._ended_by: int | None = None
        self._stops = StopStrings(body.stop, include=self._include_stop)
        self._may_stop = bool(body.stop)
        self.beginning = beginning
        self._begun = False
        self._chars = 0 if beginning is None else len(beginning.text or "")

    @property
    def stopped(self) -> bool:
        """A stop string ended it, not the backend."""
        return self._stops.matched is not None

    @property
    def tells_thoughts(self) -> bool:
        return self._heard is not None and self._heard.thoughts_told

    @property
    def unread_calls(self) -> int:
        """That are text, because they could not be read."""
        return 0 if self._heard is None else self._heard.voice.malformed_calls

    @property
    def stop_reason(self) -> str | int | None:
        """Of its stop strings and stop ids the one that ended it, if one did."""
        return self._stopped_by if self._stops.matched is None else self._stops.matched

    @property
    def ended_by(self) -> dict[str, str | int | None]:
        """What ended it, as answers tell it in the words of vLLM and of SGLang. None before it ends."""
        return {"stop_reason": self.stop_reason, "matched_stop": self.matched_stop}

    @property
    def matched_stop(self) -> str | int | None:
        """The same in SGLang's words, to which an end-of-sequence token is one of them."""
        return self._ended_by if self.stop_reason is None else self.stop_reason

    def reason(self, finish: FinishReason) -> str:
        """Why it ended, for its caller."""
        ends = self.calls and self._heard is not None and self._heard.calls_end
        return TOOL_CALLS if ends and finish is FinishReason.STOP else finish.value

    def take(self, batch: TokenBatch) -> Delta:
        """Add the next batch. Tokens behind a completed stop string are dropped."""
        beginning = self.beginning
        if beginning is None or self._begun:
            return self._answered(batch)
        self._begun = True
        if batch.scores:
            beginning.scores = batch.scores
        if beginning.text is None:
            return self._answered(batch)
        told = Delta(finish=FinishReason.LENGTH) if beginning.alone else self._answered(batch)
        told.text, told.beginning = beginning.text + told.text, beginning
        if told.parts is not None:
            told.parts = [ContentDelta(beginning.text), *told.parts]
        return told

    def _answered(self, batch: TokenBatch) -> Delta:
        tokens, finish = batch.tokens, batch.finish
        said = len(tokens) - (finish is FinishReason.STOP and not self._include_stop)
        texts: list[str] = []
        offsets: list[int] = []
        for count, token in enumerate(tokens, 1):
            offsets.append(self._chars)
            self.output_tokens += 1
            if count > said:
                break
            if self._heard is not None:
                self.reasoning_tokens += self._heard.voice.thinking
            texts.append(self._told(self._passed(self._text_of(token.id))))
            if self.stopped:
                return Delta("".join(texts), tokens[:count], offsets, FinishReason.STOP, self._ended())
        if finish is None:
            return Delta("".join(texts), tokens, offsets, parts=self._certain())
        texts.append(self._told(self._passed(self._detokenizer.flush())))
        if self._heard is None:
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
        """Certain with this token. One that the answer is told apart by is text for that alone."""
        if self._heard is None or (mark := self._heard.marks.get(id_)) is None:
            return self._detokenizer.push(id_)
        before = self._detokenizer.flush()
        return before + self._detokenizer.push(id_) + mark

    def _told(self, text: str) -> str:
        """The same text, told apart."""
        if self._heard is not None and text:
            self._add(self._heard.voice.push(text))
        return text

    def _add(self, parts: Sequence[OutputPart]) -> None:
        """Add parts up to a stop string, which counts in content alone: reasoning and calls are none."""
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

    def _ended(self) -> Sequence[Told] | None:
        if self._heard is not None:
            self._add(self._heard.voice.flush())
            if text := self._stops.flush():
                self._parts.append(ContentDelta(text))
        return self._certain(ended=True)

    def _certain(self, *, ended: bool = False) -> Sequence[Told] | None:
        """The parts that nobody was told of yet."""
        heard = self._heard
        if heard is None:
            return None
        if heard.thoughts_whole and not ended and self._parts and isinstance(self._parts[-1], ReasoningDelta):
            return ()
        parts, self._parts = merge_parts(self._parts), []
        told: list[Told] = []
        for part in parts:
            match part:
                case ContentDelta() | ReasoningDelta():
                    if heard.thoughts_shown or isinstance(part, ContentDelta):
                        told.append(part)
                case ToolCallDelta(arguments):
                    if self._growing is not None:
                        told.append(Grown(self._growing, arguments))
                case _ if heard.calls_max is not None and self.calls >= heard.calls_max:
                    self._growing = None
                case ToolCallStart(name) | CompleteToolCall(name):
                    place, id_ = self.calls, heard.name_call(name, self.calls)
                    if isinstance(part, CompleteToolCall):
                        told.append(Called(place, id_, *part))
                        self._growing = None
                    else:
                        told.append(Begun(place, id_, name))
                        self._growing = place
                    self.calls += 1
        return told

    def _passed(self, text: str) -> str:
        """What may be said of it now."""
        self._chars += len(text)
        if not self._may_stop or self._heard is not None:
            return text
        return self._stops.push(text, armed=self.output_tokens > self._min_tokens)
