"""What does an answer look like in the chat API?"""

from collections.abc import Sequence
from typing import Any

from services.openai.answering import Usage
from services.openai.choice import Choice, Delta
from services.openai.logprobs import chat_logprobs
from services.openai.rendering import Collected, UsageShown
from services.openai.schemas import ChatRequest
from services.openai.tokenizer import Tokenizer


class ChatRendering:
    """`chat.completion` and `chat.completion.chunk` objects."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, request_id: str, created_s: int) -> None:
        self._tokenizer = tokenizer
        self._logprobs = body.logprobs
        self._token_ids = body.return_token_ids
        self._usage = UsageShown.of(body.stream_options)
        self.text_alone = not (self._logprobs or self._token_ids or self._usage.so_far)
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "created": created_s,
            "model": body.model,
            "system_fingerprint": None,
        }

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        chunk = self._chunk(choice, {"delta": {"role": "assistant", "content": "", "refusal": None}})
        if self._token_ids:
            chunk["prompt_token_ids"] = list(choice.request.prompt)
        return [chunk]

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return chat_logprobs(delta.tokens, self._tokenizer) if self._logprobs else None

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text or (delta.tokens and (self._logprobs or self._token_ids)):
            piece: dict[str, Any] = {"delta": {"content": delta.text}, "logprobs": self.logprobs(delta)}
            if self._token_ids:
                piece["token_ids"] = [token.id for token in delta.tokens]
            chunks.append(self._chunk(choice, piece))
        if delta.finish is not None:
            chunks.append(self._chunk(choice, {"delta": {}, "finish_reason": delta.finish.value}))
        return chunks

    def usage(self, usage: Usage) -> list[dict[str, Any]]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": []}
        return [{**chunk, "usage": usage.rendered()}] if self._usage.at_end else []

    def whole(self, parts: Sequence[Collected], usage: Usage) -> dict[str, Any]:
        reply: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(part) for part in parts],
            "usage": usage.rendered(),
        }
        if self._token_ids:
            reply["prompt_token_ids"] = list(parts[0].choice.request.prompt)
        return reply

    def _choice(self, part: Collected) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": part.choice.index,
            "message": {"role": "assistant", "content": part.text, "refusal": None},
            "logprobs": part.logprobs,
            "finish_reason": None if part.finish is None else part.finish.value,
        }
        if self._token_ids:
            choice["token_ids"] = [token.id for token in part.tokens]
        return choice

    def _chunk(self, choice: Choice, piece: dict[str, Any]) -> dict[str, Any]:
        shown = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": None, **piece}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [shown]}
        return {**chunk, **self._usage.beside(choice)}
