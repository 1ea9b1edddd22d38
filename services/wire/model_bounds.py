"""Limits of a model (vocabulary, context length) that every request to a worker has to meet.

One row that the model cannot compute fails the step of all rows in the batch. So such a request is refused
before it enters (`malformed-is-contained`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.rooms.request import Request
from baton.wire.conversions import Malformed


@dataclass(frozen=True, slots=True)
class ModelBounds:
    vocabulary: int
    """Number of token ids in the model's vocabulary. Ids lie in [0, vocabulary). They are unsigned in
    messages and in metadata records."""
    context_tokens: int
    """Most tokens of a sequence, prompt and output together."""
    whole_prompts: bool = False
    """Whether the engine computes a prompt in one row, without chunking (`EngineFacts.chunked_prompts` is
    False)."""

    def check(self, request: Request) -> None:
        """Raise Malformed if the model cannot compute the request. The text names the field, but not its
        tokens."""
        if request.tokens_max > self.context_tokens:
            raise Malformed(
                f"request may grow to {request.tokens_max} tokens: the model's context holds"
                f" {self.context_tokens}"
            )
        for field, tokens in (
            ("prompt", request.prompt),
            ("output", request.output),
            ("sampling.logprob_token_ids", request.sampling.logprob_token_ids),
        ):
            if not self.knows(tokens):
                raise Malformed(
                    f"request.{field} has an id outside the vocabulary of {self.vocabulary} tokens"
                )

    def knows(self, tokens: Iterable[int]) -> bool:
        return max(tokens, default=0) < self.vocabulary
