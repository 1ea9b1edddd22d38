"""Answers of the Responses API, whole and as events."""

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
from baton.api.generation.logprobs import chat_logprobs, token_text
from baton.api.generation.rendering import Collected
from baton.api.http.event_stream import NAMED
from baton.api.model_interface import Model
from baton.api.responses.response_builder import COMPLETED, IN_PROGRESS, INCOMPLETE, Event, ResponseBuilder
from baton.api.tools.parsing.output_parts import ContentDelta, ReasoningDelta
from baton.rooms.request import FinishReason

FAILED: Final = "failed"
CUT_OFF: Final[Mapping[str, str]] = {"reason": "max_output_tokens"}
RATE_STATUS: Final = 429

Keep = Callable[[Mapping[str, Any]], bool]
"""Stores a response that ended by itself. Returns whether it was stored."""


class ResponsesRendering:
    """One `response` object, or the events that build it."""

    framing = NAMED
    text_alone = False
    """False, because each event has its own number."""

    def __init__(
        self,
        head: Mapping[str, Any],
        making: ResponseBuilder,
        model: Model,
        keep: Keep,
        now_s: Callable[[], int],
        *,
        logprobs: bool,
    ) -> None:
        """`head`: fields of the response that are known before its answer. `now_s`: the wall clock,
        seconds."""
        self._head = head
        self._making = making
        self._keep = keep
        self._now_s = now_s
        self._tokenizer = model.tokenizer
        self._token_text = partial(token_text, tokenizer=model.tokenizer)
        self.shows_logprobs = logprobs
        self._waiting: list[Any] = []
        """Log-probabilities of tokens whose text is not certain yet."""
        self._apart = False
        """Whether the last part was reasoning or a call."""
        self._finish: FinishReason | None = None
        self._events = 0

    def opening(self, _: ChoiceAssembler) -> list[dict[str, Any]]:
        return self._opened()

    def _opened(self) -> list[dict[str, Any]]:
        begun = self._response(IN_PROGRESS)
        return self._numbered(
            {"type": f"response.{each}", "response": begun} for each in ("created", "in_progress")
        )

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return log-probabilities of the content. Those of reasoning, calls and marks are not shown."""
        if not self.shows_logprobs:
            return None
        told = chat_logprobs(delta.tokens, self._tokenizer, self._token_text)["content"]
        parts = (ContentDelta(delta.text),) if delta.parts is None and delta.text else delta.parts or ()
        if not parts and delta.finish is None:
            self._waiting += told
            return {"content": []}
        waiting, self._waiting = self._waiting, []
        behind = not self._apart
        if parts and not any(isinstance(part, ContentDelta) for part in parts):
            shown: list[Any] = []
        elif parts:
            shown = [*waiting, *told] if behind else told
        else:
            shown = [*waiting, *told] if behind else []
        if parts:
            self._apart = not isinstance(parts[-1], ContentDelta)
        return {"content": shown}

    def chunks(self, _: ChoiceAssembler, delta: Delta) -> list[dict[str, Any]]:
        told = self.logprobs(delta)
        parts = (ContentDelta(delta.text),) if delta.parts is None else delta.parts
        return self._numbered(self._made(parts, [] if told is None else told["content"], delta.finish))

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        response = self._ended(usage)
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the chunks after a failure. Unfinished items are shown as they are.

        The error is sent in two events, because some clients wait for the one and some for the other. The
        opening events come first if they were not sent: clients refuse a stream without them.
        """
        opened = [] if self._events else self._opened()
        self._making.close(INCOMPLETE)
        told = {"code": error.code, "message": str(error), "param": error.param}
        code = "rate_limit_exceeded" if error.status == RATE_STATUS else "server_error"
        said = {"code": code, "message": str(error)}
        response = self._response(FAILED) | {"error": said, "store": False}
        ended: list[Event] = [{"type": "error", **told}, {"type": "response.failed", "response": response}]
        return opened + self._numbered(ended)

    def whole(self, parts: Sequence[Collected], usage: Usage) -> dict[str, Any]:
        (part,) = parts
        said = (ContentDelta(part.text),) if part.parts is None else part.parts
        logprobs = [] if part.logprobs is None else part.logprobs["content"]
        self._made(said, logprobs, part.finish)
        return self._ended(usage)

    def _made(
        self,
        parts: Iterable[AnswerPart],
        logprobs: Sequence[Any],
        finish: FinishReason | None,
    ) -> list[Event]:
        """Return the events of the parts. `logprobs`: of the first text among them, or of the end of the
        last one."""
        making, events = self._making, []
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

    def _ended(self, usage: Usage) -> dict[str, Any]:
        whole = self._finish is FinishReason.STOP
        response = self._response(COMPLETED if whole else INCOMPLETE)
        response |= {
            "completed_at": self._now_s() if whole else None,
            "incomplete_details": None if whole else CUT_OFF,
            "usage": _counted(usage),
        }
        return response if self._keep(response) else response | {"store": False}

    def _response(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "output": [*self._making.items]}

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        numbered = []
        for event in events:
            numbered.append({**event, "sequence_number": self._events})
            self._events += 1
        return numbered


def _counted(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
