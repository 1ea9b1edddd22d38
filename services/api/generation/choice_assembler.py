"""Assembly of one choice from its output tokens: text, stop strings, reasoning, tool calls, finish reason.

The assembled choice depends only on the tokens, not on how they were batched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from typing_extensions import TypedDict

from baton.api.generation.prompt_echo import PromptEcho
from baton.api.requests.meaning import Meaning
from baton.api.resuming.drawn_values import DrawnValues
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
from baton.rooms.request import FinishReason, Request, Token, TokenBatch

OutputFinish = Literal["stop", "length"]
"""Type of the finish reason of a choice that has no tool calls, in OpenAI's words."""
Finish = Literal["stop", "length", "tool_calls"]


class StopFields(TypedDict):
    stop_reason: int | str | None
    matched_stop: int | str | None


class AnsweredCall(NamedTuple):
    """A whole tool call of an answer, as it is returned to the client."""

    place: int
    """Index of the tool call among the tool calls of the answer, from 0."""
    id: str
    name: str
    arguments: str


class AnsweredCallStart(NamedTuple):
    """Start of a tool call in a streamed answer. The arguments follow as AnsweredCallDelta."""

    place: int
    id: str
    name: str


class AnsweredCallDelta(NamedTuple):
    """Next piece of the arguments of the tool call that was started last."""

    place: int
    arguments: str
    """Next characters of the arguments. All pieces of a tool call together are a JSON text, unless the answer
    was cut off."""


AnswerPart = ContentDelta | ReasoningDelta | AnsweredCall | AnsweredCallStart | AnsweredCallDelta


def whole_calls(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Return the parts of an answer, with the start and the pieces of each tool call joined into one
    AnsweredCall."""
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
    """Parser of one choice's text into content, reasoning and tool calls, with the options of its request."""

    parser: AnswerParser
    marks: Mapping[int, str]
    """Texts of the special tokens (such as `<tool_call>`) that the parser needs although they are left out of
    decoded text, by token id."""
    name_call: Callable[[str, int, str], str]
    """Function that makes the id of a tool call. It takes the tool's name, the number of tool calls before
    this call, and 32 hexadecimal digits that were drawn for it."""
    calls_max: int | None = None
    ends_by_calls: bool = True
    """Whether tool calls make the finish reason `tool_calls`. If the request forces one named tool, the
    finish reason stays `stop`, as in OpenAI's API."""
    shows_reasoning: bool = True
    streams_reasoning: bool = True
    """Whether a stream sends reasoning while it is generated. Otherwise it is sent in one piece when it has
    ended."""
    counts_reasoning: bool = False
    """Whether reasoning tokens are counted, because the model's reasoning can be separated from its
    answer."""


@dataclass(slots=True)
class Delta:
    """Text, tokens and parts that one batch of output tokens adds to a choice."""

    text: str = ""
    tokens: Sequence[Token] = ()
    """All output tokens that count for usage. Includes the tokens of a stop string and an end-of-sequence
    token, though their text may not be shown."""
    offsets: list[int] = field(default_factory=list)
    """For each token, the number of characters of the choice's text before it."""
    finish: FinishReason | None = None
    parts: Sequence[AnswerPart] | None = None
    """The text split into content, reasoning and tool calls. None: the text is not parsed, so all of it is
    content."""
    echo: PromptEcho | None = None
    """The echoed prompt, whose text is part of `text`. Only the first delta of a choice has one."""

    @property
    def entries(self) -> int:
        """Number of log-probabilities in the response for this delta. It counts the alternatives of each
        output token, and the scores of an echoed prompt."""
        prompt = 0 if self.echo is None else self.echo.entries
        return prompt + sum(len(token.top) for token in self.tokens)

    @property
    def only_text(self) -> ContentDelta | ReasoningDelta | None:
        """Text of the delta if it is content alone, or reasoning alone. None if it has several parts, or a
        tool call."""
        parts = self.parts
        if not parts:
            return ContentDelta(self.text if parts is None else "")
        first = parts[0]
        return first if len(parts) == 1 and isinstance(first, ContentDelta | ReasoningDelta) else None


class ChoiceAssembler:
    """Assembler of one choice of an answer. It is given batches of output tokens, until the delta that it
    returns has a `finish`."""

    __slots__ = (
        "_begun",
        "_chars",
        "_detokenizer",
        "_draws",
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
        draws: DrawnValues | None = None,
    ) -> None:
        """Start an empty choice. `detokenizer`: a new one that starts after the prompt. `parsing`: None if
        the text is not parsed. `echo`: None if the response shows nothing of the prompt. `draws`: values of
        the request, from which ids of tool calls are made; needed with `parsing`."""
        self.index = index
        self.request = request
        self.output_tokens = 0
        self.finish: FinishReason | None = None
        """Finish reason of the choice as the client gets it. None until the last delta was returned."""
        self.calls = 0
        """Number of tool calls that the choice has so far."""
        self.reasoning_tokens = 0
        self._parsing = parsing
        self._draws = draws
        self._growing: int | None = None
        """Index of the tool call whose arguments are being generated. None: there is none, or it is above
        `calls_max` and not returned."""
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
        """Whether a stop string has ended the choice. The API finds stop strings itself, so the backend may
        still generate tokens."""
        return self._stops.matched is not None

    @property
    def is_plain(self) -> bool:
        """Whether all output is content, in which no stop string is searched."""
        return self._parsing is None and not self._may_stop

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice. None: no stop string has been found."""
        return self._stops.matched

    @property
    def counts_reasoning(self) -> bool:
        return self._parsing is not None and self._parsing.counts_reasoning

    @property
    def malformed_calls(self) -> int:
        """Number of tool calls that could not be parsed, and were returned as text."""
        return 0 if self._parsing is None else self._parsing.parser.malformed_calls

    @property
    def stop_reason(self) -> str | int | None:
        """The request's stop string, or stop token id, that ended the choice. None: the choice has not ended,
        or ended in another way."""
        return self._stopped_by if self._stops.matched is None else self._stops.matched

    @property
    def ended_by(self) -> StopFields:
        """The fields that name the stop string or token which ended a choice: vLLM's `stop_reason` and
        SGLang's `matched_stop`. Both are None before the end."""
        return {"stop_reason": self.stop_reason, "matched_stop": self.matched_stop}

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string or stop token id that ended the choice, as SGLang reports it. Unlike `stop_reason`,
        it may be the model's own end-of-sequence token."""
        return self._ended_by if self.stop_reason is None else self.stop_reason

    def reason(self, finish: FinishReason) -> Finish:
        """Return the finish reason for the client, as OpenAI's API names it. `finish`: finish reason from the
        workers."""
        if finish is not FinishReason.STOP:
            return "length"
        ends = self.calls and self._parsing is not None and self._parsing.ends_by_calls
        return "tool_calls" if ends else "stop"

    def take(self, batch: TokenBatch) -> Delta:
        """Add the next batch of output tokens, and return the delta that results. Tokens after a completed
        stop string are dropped."""
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
        """Return the text that the next token completes. The bytes of an unfinished character are kept for
        later. Special tokens that the parser has to see are returned as their text."""
        if self._parsing is None or (mark := self._parsing.marks.get(id_)) is None:
            return self._detokenizer.push(id_)
        before = self._detokenizer.flush()
        return before + self._detokenizer.push(id_) + mark

    def _parsed(self, text: str) -> str:
        """Pass the text to the parser of the choice, if there is one, and return the text unchanged."""
        if self._parsing is not None and text:
            self._add(self._parsing.parser.push(text))
        return text

    def _add(self, parts: Sequence[OutputPart]) -> None:
        """Add parsed parts to the choice, up to the first stop string. Stop strings are searched in content
        only, not in reasoning and tool calls."""
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
        """Return the parsed parts of the answer that can be sent now and were not returned before. None: the
        choice has no parser. `ended`: whether the choice has ended."""
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
                    place, id_ = self.calls, parsing.name_call(name, self.calls, self._digits(self.calls))
                    if isinstance(part, CompleteToolCall):
                        told.append(AnsweredCall(place, id_, *part))
                        self._growing = None
                    else:
                        told.append(AnsweredCallStart(place, id_, name))
                        self._growing = place
                    self.calls += 1
        return told

    def _digits(self, call: int) -> str:
        """Return the hexadecimal digits that were drawn for the id of tool call number `call` (from 0)."""
        if self._draws is None:
            raise RuntimeError("a choice with a parser needs drawn values")
        return self._draws.call_digits(self.index, call)

    def _released(self, text: str) -> str:
        """Return the text that can be sent now, because it cannot be part of a stop string any more. Text of
        a choice with a parser is returned whole: `_add` searches it for stop strings."""
        self._chars += len(text)
        if not self._may_stop or self._parsing is not None:
            return text
        return self._stops.push(text, armed=self.output_tokens > self._min_tokens)
