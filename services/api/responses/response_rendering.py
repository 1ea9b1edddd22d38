"""Rendering of answers of the Responses API, as a whole or as a stream of events."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from baton.api.errors import ApiError
from baton.api.generation.answer_stream import Usage
from baton.api.generation.choice_assembler import (
    AnsweredCall,
    AnsweredCallDelta,
    AnsweredCallStart,
    AnswerPart,
    ChoiceAssembler,
    Delta,
)
from baton.api.generation.logprob_objects import ChosenLogprob, ContentLogprobs
from baton.api.generation.logprobs import chat_logprobs, token_text
from baton.api.generation.rendering import Collected, TextKind
from baton.api.http.event_stream import NAMED
from baton.api.model_interface import Model
from baton.api.responses.response_builder import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    ItemPieces,
    ResponseBuilder,
)
from baton.api.responses.response_objects import (
    IncompleteDetails,
    ResponseAnswer,
    ResponseHead,
    ResponsesEvent,
    ResponseStatus,
    ResponseUsage,
)
from baton.api.tools.parsing.output_parts import ContentDelta, ReasoningDelta
from baton.rooms.request import FinishReason

FAILED: Final = "failed"
CUT_OFF: Final[IncompleteDetails] = {"reason": "max_output_tokens"}
RATE_STATUS: Final = 429

Keep = Callable[[Mapping[str, Any], Sequence[ItemPieces]], bool]
"""Function that stores a response which ended without an error. It takes the response and the sizes of the
pieces in which each output item was streamed, and returns whether the response was stored."""


class ResponsesRendering:
    """Renderer of one answer as a `response` object, or as the events that build it."""

    framing = NAMED

    def __init__(
        self,
        head: ResponseHead,
        making: ResponseBuilder,
        model: Model,
        keep: Keep,
        now_s: Callable[[], int],
        *,
        logprobs: bool,
    ) -> None:
        """Start a response.

        `head`: fields of the response that are known before its output. `making`: builder of its items.
        `keep`: stores the response. `now_s`: function that returns the wall-clock time, seconds.
        """
        self._head = head
        self._making = making
        self._keep = keep
        self._now_s = now_s
        self._tokenizer = model.tokenizer
        self._token_text = partial(token_text, tokenizer=model.tokenizer)
        self.shows_logprobs = logprobs
        self._waiting: list[ChosenLogprob] = []
        """Log-probabilities of tokens that have given no text yet, such as a part of a character. They are
        shown with the next text."""
        self._apart = False
        """Whether the last part of the answer was reasoning or a tool call, and not content."""
        self._finish: FinishReason | None = None
        self._events = 0

    def has_template(self, _: TextKind) -> bool:
        """Return False, because each event has its own `sequence_number`."""
        return False

    def opening(self, _: ChoiceAssembler) -> list[ResponsesEvent]:
        return self._opened()

    def _opened(self) -> list[ResponsesEvent]:
        begun = self._response(IN_PROGRESS)
        return self._numbered(
            [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        )

    def logprobs(self, delta: Delta) -> ContentLogprobs | None:
        """Return the log-probabilities of a delta's content. Those of reasoning and tool calls are left out.
        None if the client asked for none."""
        if not self.shows_logprobs:
            return None
        own = chat_logprobs(delta.tokens, self._tokenizer, self._token_text)["content"]
        parts = (ContentDelta(delta.text),) if delta.parts is None and delta.text else delta.parts or ()
        if not parts and delta.finish is None:
            self._waiting += own
            return {"content": []}
        waiting, self._waiting = self._waiting, []
        behind = not self._apart
        if parts and not any(isinstance(part, ContentDelta) for part in parts):
            shown: list[ChosenLogprob] = []
        elif parts:
            shown = [*waiting, *own] if behind else own
        else:
            shown = [*waiting, *own] if behind else []
        if parts:
            self._apart = not isinstance(parts[-1], ContentDelta)
        return {"content": shown}

    def chunks(self, _: ChoiceAssembler, delta: Delta) -> list[ResponsesEvent]:
        shown = self.logprobs(delta)
        parts = (ContentDelta(delta.text),) if delta.parts is None else delta.parts
        return self._numbered(self._made(parts, [] if shown is None else shown["content"], delta.finish))

    def closing(self, usage: Usage) -> list[ResponsesEvent]:
        response = self._ended(usage)
        if response["status"] == COMPLETED:
            return self._numbered([{"type": "response.completed", "response": response}])
        return self._numbered([{"type": "response.incomplete", "response": response}])

    def failure(self, error: ApiError) -> list[ResponsesEvent]:
        """Return the events after a failure. Unfinished items are shown as they are.

        The error is sent in two events, because some clients wait for the one and some for the other. If the
        opening events were not sent, they come first: clients refuse a stream without them.
        """
        opened = [] if self._events else self._opened()
        self._making.close(INCOMPLETE)
        response = self._response(FAILED)
        response["error"] = {
            "code": "rate_limit_exceeded" if error.status == RATE_STATUS else "server_error",
            "message": str(error),
        }
        response["store"] = False
        return opened + self._numbered(
            [
                {"type": "error", "code": error.code, "message": str(error), "param": error.param},
                {"type": "response.failed", "response": response},
            ]
        )

    def whole(self, parts: Sequence[Collected], usage: Usage) -> ResponseAnswer:
        (part,) = parts
        shown = (ContentDelta(part.text),) if part.parts is None else part.parts
        logprobs = [] if part.logprobs is None else part.logprobs["content"]
        self._made(shown, logprobs, part.finish)
        return self._ended(usage)

    def _made(
        self,
        parts: Iterable[AnswerPart],
        logprobs: Sequence[ChosenLogprob],
        finish: FinishReason | None,
    ) -> list[ResponsesEvent]:
        """Add parts of the answer to the response, and return the events that the client gets for them.

        `logprobs`: log-probabilities of the first text among the parts, or of the end of the last message.
        `finish`: reason why the answer ended, or None.
        """
        making, events = self._making, list[ResponsesEvent]()
        for part in parts:
            match part:
                case ContentDelta(""):
                    pass
                case ContentDelta(text):
                    events += making.add_text(text, logprobs)
                    logprobs = ()
                case ReasoningDelta(text):
                    events += making.add_reasoning(text)
                case AnsweredCall(_, id_, name, arguments):
                    events += [
                        *making.begin_call(id_, name),
                        *making.add_arguments(arguments),
                        *making.close(),
                    ]
                case AnsweredCallStart(_, id_, name):
                    events += making.begin_call(id_, name)
                case AnsweredCallDelta(_, arguments):
                    events += making.add_arguments(arguments)
        if finish is not None:
            self._finish = finish
            if logprobs and making.has_open_message:
                events += making.add_text("", logprobs)
            events += making.close(COMPLETED if finish is FinishReason.STOP else INCOMPLETE)
            if not making.items:
                events += [*making.add_text("", logprobs), *making.close()]
        return events

    def _ended(self, usage: Usage) -> ResponseAnswer:
        whole = self._finish is FinishReason.STOP
        response = self._response(COMPLETED if whole else INCOMPLETE)
        response["completed_at"] = self._now_s() if whole else None
        response["incomplete_details"] = None if whole else CUT_OFF
        response["usage"] = _counted(usage)
        if not self._keep(response, self._making.pieces):
            response["store"] = False
        return response

    def _response(self, status: ResponseStatus) -> ResponseAnswer:
        return {**self._head, "status": status, "output": [*self._making.items]}

    def _numbered(self, events: list[ResponsesEvent]) -> list[ResponsesEvent]:
        for event in events:
            event["sequence_number"] = self._events
            self._events += 1
        return events


def _counted(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
