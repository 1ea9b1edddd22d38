"""Rendering of text completions, as whole responses and as chunks of a stream."""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NotRequired

from baton.api.errors import ApiError, ErrorAnswer
from baton.api.generation.answer_stream import TokenUsage, Usage
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta, OutputFinish, StopFields
from baton.api.generation.logprob_objects import CompletionLogprobs, PromptLogprobs
from baton.api.generation.logprobs import completion_logprobs, prompt_tokens, shown_scores, token_text
from baton.api.generation.rendering import AnswerHead, Collected, TextKind, UsageSoFar, usage_of_chunk
from baton.api.http.event_stream import PLAIN
from baton.api.model_interface import Model
from baton.api.requests.meaning import Meaning
from baton.api.requests.schemas import CompletionRequest
from baton.api.requests.scored_prompts import ALL
from baton.rooms.request import FinishReason, Token


class CompletionChoice(StopFields):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: OutputFinish | None
    token_ids: NotRequired[list[int] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class CompletionHead(AnswerHead):
    object: Literal["text_completion"]


class CompletionAnswer(CompletionHead):
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(CompletionHead, UsageSoFar):
    choices: list[CompletionChoice]


class CompletionRendering:
    """Renderer of the answers to one completion request, as `text_completion` objects. Choices are in the
    order of their prompts."""

    framing = PLAIN

    def __init__(
        self, body: CompletionRequest, meaning: Meaning, model: Model, request_id: str, created_s: int
    ) -> None:
        self._token_text = partial(
            token_text, tokenizer=model.tokenizer, by_id=body.return_tokens_as_token_ids
        )
        self._meaning = meaning
        self.shows_logprobs = body.logprobs is not None
        self._top = model.vocabulary if body.logprobs == ALL else body.logprobs or 0
        self._prompt_top = model.vocabulary if body.prompt_logprobs == ALL else body.prompt_logprobs
        self._token_ids = body.return_token_ids
        self._has_template = not (self.shows_logprobs or self._token_ids or meaning.usage_so_far)
        self._head: CompletionHead = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": created_s,
            "model": body.model or model.name,
            "system_fingerprint": None,
        }

    def has_template(self, _: TextKind) -> bool:
        return self._has_template

    def logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if not self.shows_logprobs:
            return None
        tokens, offsets, echo = delta.tokens, delta.offsets, delta.echo
        if echo is not None:
            tokens = [*prompt_tokens(echo, self._top), *tokens]
            offsets = [*echo.offsets, *offsets]
        return completion_logprobs(tokens, offsets, self._token_text)

    def opening(self, choice: ChoiceAssembler) -> list[CompletionChunk]:
        if not self._token_ids:
            return []
        piece = self._piece(choice, "", [], self.logprobs(Delta()), None)
        return [self._chunk(choice, {**piece, "prompt_token_ids": list(choice.request.prompt)}, 0)]

    def chunks(self, choice: ChoiceAssembler, delta: Delta) -> list[CompletionChunk]:
        shown = delta.text or (delta.tokens and (self.shows_logprobs or self._token_ids))
        if not shown and delta.finish is None:
            return []
        piece = self._piece(choice, delta.text, delta.tokens, self.logprobs(delta), delta.finish)
        return [self._chunk(choice, piece, choice.output_tokens)]

    def closing(self, usage: Usage) -> list[CompletionChunk]:
        return (
            [{**self._head, "choices": [], "usage": usage.rendered()}] if self._meaning.usage_at_end else []
        )

    def failure(self, error: ApiError) -> list[ErrorAnswer]:
        return [error.body]

    def whole(self, parts: Sequence[Collected], usage: Usage) -> CompletionAnswer:
        return {
            **self._head,
            "choices": [self._choice(part) for part in parts],
            "usage": usage.rendered(),
        }

    def _choice(self, part: Collected) -> CompletionChoice:
        piece: CompletionChoice = {
            "token_ids": None,
            "prompt_token_ids": list(part.choice.request.prompt) if self._token_ids else None,
            "prompt_logprobs": None,
            **self._piece(part.choice, part.text, part.tokens, part.logprobs, part.finish),
        }
        if self._prompt_top is not None and part.choice.echo is not None:
            piece["prompt_logprobs"] = shown_scores(part.choice.echo, self._prompt_top, self._token_text)
        return piece

    def _chunk(self, choice: ChoiceAssembler, piece: CompletionChoice, tokens: int) -> CompletionChunk:
        return {**self._head, "choices": [piece], **usage_of_chunk(self._meaning, choice, tokens)}

    def _piece(
        self,
        choice: ChoiceAssembler,
        text: str,
        tokens: Sequence[Token],
        logprobs: CompletionLogprobs | None,
        finish: FinishReason | None,
    ) -> CompletionChoice:
        piece: CompletionChoice = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else finish.value,
            "stop_reason": choice.stop_reason,
            "matched_stop": choice.matched_stop,
        }
        if self._token_ids:
            piece["token_ids"] = [token.id for token in tokens]
        return piece
