"""Rendering of chat completions, as whole responses and as chunks of a stream."""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from baton.api.errors import ApiError, ErrorAnswer
from baton.api.generation.answer_stream import TokenUsage, Usage
from baton.api.generation.choice_assembler import (
    AnsweredCall,
    AnsweredCallDelta,
    AnsweredCallStart,
    ChoiceAssembler,
    Delta,
    Finish,
    StopFields,
)
from baton.api.generation.logprob_objects import ChatLogprobs, PromptLogprobs
from baton.api.generation.logprobs import chat_logprobs, shown_scores, token_text
from baton.api.generation.rendering import AnswerHead, Collected, TextKind, UsageSoFar, usage_of_chunk
from baton.api.http.event_stream import PLAIN
from baton.api.model_interface import Model
from baton.api.requests.meaning import Meaning
from baton.api.requests.schemas import ChatRequest
from baton.api.requests.scored_prompts import ALL
from baton.api.tools.parsing.output_parts import ContentDelta, ReasoningDelta


class MadeFunction(TypedDict):
    name: str
    arguments: str
    """Arguments of the tool call as JSON text."""


class MadeCall(TypedDict):
    id: str
    type: Literal["function"]
    function: MadeFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None
    """The model's reasoning, under the field name that most clients read."""
    reasoning: str | None
    """The model's reasoning again, under vLLM's newer name of the field."""
    tool_calls: NotRequired[list[MadeCall]]


class ChatChoice(StopFields):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None


class ChatHead(AnswerHead):
    prompt_token_ids: NotRequired[list[int] | None]


class ChatAnswer(ChatHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | None


class GrowingFunction(TypedDict):
    name: NotRequired[str]
    arguments: str
    """Next piece of the arguments of a streamed tool call. The pieces of one call join to a JSON text."""


class GrowingCall(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: GrowingFunction


class GrowingMessage(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str | None
    reasoning: str
    tool_calls: list[GrowingCall]


class ChatChunkChoice(TypedDict):
    index: int
    delta: GrowingMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: NotRequired[int | str | None]
    matched_stop: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(ChatHead, UsageSoFar):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ChatRendering:
    """Renderer of the answers to one chat request, as `chat.completion` and `chat.completion.chunk`
    objects."""

    framing = PLAIN

    def __init__(
        self, body: ChatRequest, meaning: Meaning, model: Model, request_id: str, created_s: int
    ) -> None:
        self._token_text = partial(
            token_text, tokenizer=model.tokenizer, by_id=body.return_tokens_as_token_ids
        )
        self._tokenizer = model.tokenizer
        self._meaning = meaning
        self.shows_logprobs = body.logprobs
        self._prompt_top = model.vocabulary if body.prompt_logprobs == ALL else body.prompt_logprobs
        self._token_ids = body.return_token_ids
        self._has_template = not (self.shows_logprobs or self._token_ids or meaning.usage_so_far)
        self._head: ChatHead = {
            "id": f"chatcmpl-{request_id}",
            "created": created_s,
            "model": body.model or model.name,
            "system_fingerprint": None,
        }

    def has_template(self, _: TextKind) -> bool:
        return self._has_template

    def opening(self, choice: ChoiceAssembler) -> list[ChatChunk]:
        chunk = self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}, 0)
        if self._token_ids:
            chunk["prompt_token_ids"] = list(choice.request.prompt)
        return [chunk]

    def logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta.tokens, self._tokenizer, self._token_text) if self.shows_logprobs else None

    def chunks(self, choice: ChoiceAssembler, delta: Delta) -> list[ChatChunk]:
        shown = _shown(delta)
        if not shown and delta.tokens and (self.shows_logprobs or self._token_ids):
            shown = [{"content": ""}]
        if not shown and delta.finish is not None:
            shown = [{}]
        chunks = [self._chunk(choice, each, choice.output_tokens) for each in shown]
        for index, chunk in enumerate(chunks):
            (piece,) = chunk["choices"]
            piece["logprobs"] = None if index else self.logprobs(delta)
            if self._token_ids:
                piece["token_ids"] = [] if index else [token.id for token in delta.tokens]
        if delta.finish is not None:
            last, ended = chunks[-1]["choices"][0], choice.ended_by
            last["finish_reason"] = choice.reason(delta.finish)
            last["stop_reason"], last["matched_stop"] = ended["stop_reason"], ended["matched_stop"]
        return chunks

    def closing(self, usage: Usage) -> list[ChatChunk]:
        if not self._meaning.usage_at_end:
            return []
        counts = usage.rendered()
        return [{**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counts}]

    def failure(self, error: ApiError) -> list[ErrorAnswer]:
        return [error.body]

    def whole(self, parts: Sequence[Collected], usage: Usage) -> ChatAnswer:
        reply: ChatAnswer = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(part) for part in parts],
            "usage": usage.rendered(),
            "prompt_token_ids": list(parts[0].choice.request.prompt) if self._token_ids else None,
            "prompt_logprobs": None,
        }
        echo = parts[0].choice.echo
        if self._prompt_top is not None and echo is not None:
            reply["prompt_logprobs"] = shown_scores(echo, self._prompt_top, self._token_text)
        return reply

    def _choice(self, part: Collected) -> ChatChoice:
        return {
            "index": part.choice.index,
            "message": _message(part),
            "logprobs": part.logprobs,
            "finish_reason": None if part.finish is None else part.choice.reason(part.finish),
            **part.choice.ended_by,
            "token_ids": [token.id for token in part.tokens] if self._token_ids else None,
        }

    def _chunk(self, choice: ChoiceAssembler, delta: GrowingMessage, tokens: int) -> ChatChunk:
        piece: ChatChunkChoice = {
            "index": choice.index,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": None,
            "finish_reason": None,
        }
        return {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [piece],
            **usage_of_chunk(self._meaning, choice, tokens),
        }


def _message(part: Collected) -> AnswerMessage:
    content, reasoning, calls = part.content, part.reasoning, part.calls
    is_empty = not content and bool(calls or reasoning)
    message: AnswerMessage = {
        "role": "assistant",
        "content": None if is_empty else content,
        "refusal": None,
        "reasoning_content": reasoning or None,
        "reasoning": reasoning or None,
    }
    if calls:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in calls
        ]
    return message


def _shown(delta: Delta) -> list[GrowingMessage]:
    """Return the fields that a delta adds to a streamed chat message: content, reasoning or tool calls."""
    if delta.parts is None:
        return [{"content": delta.text}] if delta.text else []
    shown: list[GrowingMessage] = []
    for part in delta.parts:
        match part:
            case ContentDelta(text):
                shown.append({"content": text})
            case ReasoningDelta(text):
                shown.append({"reasoning_content": text, "reasoning": text})
            case AnsweredCall(place, id_, name, arguments):
                shown += [_begun(place, id_, name), _grown(place, arguments)]
            case AnsweredCallStart(place, id_, name):
                shown.append(_begun(place, id_, name))
            case AnsweredCallDelta(place, arguments):
                shown.append(_grown(place, arguments))
    return shown


def _begun(place: int, id_: str, name: str) -> GrowingMessage:
    function: GrowingFunction = {"name": name, "arguments": ""}
    return {"tool_calls": [{"index": place, "id": id_, "type": "function", "function": function}]}


def _grown(place: int, arguments: str) -> GrowingMessage:
    return {"tool_calls": [{"index": place, "function": {"arguments": arguments}}]}
