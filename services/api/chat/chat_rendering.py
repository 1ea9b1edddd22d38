"""Answers of chat completions, whole and as chunks of a stream."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from baton.api.errors import ApiError
from baton.api.generation.answer_stream import Usage
from baton.api.generation.choice_assembler import (
    AnsweredCall,
    AnsweredCallDelta,
    AnsweredCallStart,
    ChoiceAssembler,
    Delta,
)
from baton.api.generation.logprobs import chat_logprobs, shown_scores, token_text
from baton.api.generation.rendering import Collected, usage_of_chunk
from baton.api.http.event_stream import PLAIN
from baton.api.model_interface import Model
from baton.api.requests.meaning import Meaning
from baton.api.requests.schemas import ChatRequest
from baton.api.requests.scored_prompts import ALL
from baton.api.tools.parsing.output_parts import ContentDelta, ReasoningDelta


class ChatRendering:
    """`chat.completion` and `chat.completion.chunk` objects."""

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
        self.text_alone = not (self.shows_logprobs or self._token_ids or meaning.usage_so_far)
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "created": created_s,
            "model": body.model or model.name,
            "system_fingerprint": None,
        }

    def opening(self, choice: ChoiceAssembler) -> list[dict[str, Any]]:
        chunk = self._chunk(choice, {"delta": {"role": "assistant", "content": "", "refusal": None}}, 0)
        if self._token_ids:
            chunk["prompt_token_ids"] = list(choice.request.prompt)
        return [chunk]

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return chat_logprobs(delta.tokens, self._tokenizer, self._token_text) if self.shows_logprobs else None

    def chunks(self, choice: ChoiceAssembler, delta: Delta) -> list[dict[str, Any]]:
        shown = _shown(delta)
        if not shown and delta.tokens and (self.shows_logprobs or self._token_ids):
            shown = [{"content": ""}]
        if not shown and delta.finish is not None:
            shown = [{}]
        pieces: list[dict[str, Any]] = []
        for index, each in enumerate(shown):
            pieces.append({"delta": each, "logprobs": None if index else self.logprobs(delta)})
            if self._token_ids:
                pieces[-1]["token_ids"] = [] if index else [token.id for token in delta.tokens]
        if delta.finish is not None:
            pieces[-1] |= {"finish_reason": choice.reason(delta.finish), **choice.ended_by}
        return [self._chunk(choice, piece, choice.output_tokens) for piece in pieces]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": []}
        return [{**chunk, "usage": usage.rendered()}] if self._meaning.usage_at_end else []

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.body]

    def whole(self, parts: Sequence[Collected], usage: Usage) -> dict[str, Any]:
        reply: dict[str, Any] = {
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

    def _choice(self, part: Collected) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": part.choice.index,
            "message": _message(part),
            "logprobs": part.logprobs,
            "finish_reason": None if part.finish is None else part.choice.reason(part.finish),
            **part.choice.ended_by,
            "token_ids": [token.id for token in part.tokens] if self._token_ids else None,
        }
        return choice

    def _chunk(self, choice: ChoiceAssembler, piece: dict[str, Any], tokens: int) -> dict[str, Any]:
        shown = {"index": choice.index, "logprobs": None, "finish_reason": None, **piece}
        shown["delta"] = {"reasoning_content": None, **piece["delta"]}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [shown]}
        return {**chunk, **usage_of_chunk(self._meaning, choice, tokens)}


def _message(part: Collected) -> dict[str, Any]:
    content, reasoning, calls = part.content, part.reasoning, part.calls
    is_empty = not content and bool(calls or reasoning)
    message: dict[str, Any] = {"role": "assistant", "content": None if is_empty else content, "refusal": None}
    message |= _reasoning(reasoning or None)
    if calls:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in calls
        ]
    return message


def _shown(delta: Delta) -> list[dict[str, Any]]:
    """Return what a delta adds to the message, piece by piece."""
    if delta.parts is None:
        return [{"content": delta.text}] if delta.text else []
    shown: list[dict[str, Any]] = []
    for part in delta.parts:
        match part:
            case ContentDelta(text):
                shown.append({"content": text})
            case ReasoningDelta(text):
                shown.append(_reasoning(text))
            case AnsweredCall(place, id_, name, arguments):
                shown += [_begun(place, id_, name), _grown(place, arguments)]
            case AnsweredCallStart(place, id_, name):
                shown.append(_begun(place, id_, name))
            case AnsweredCallDelta(place, arguments):
                shown.append(_grown(place, arguments))
    return shown


def _begun(place: int, id_: str, name: str) -> dict[str, Any]:
    call = {"index": place, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
    return {"tool_calls": [call]}


def _grown(place: int, arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": place, "function": {"arguments": arguments}}]}


def _reasoning(text: str | None) -> dict[str, str | None]:
    """Return reasoning under the name that most clients read, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}
