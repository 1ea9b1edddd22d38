"""Bounds on requests that a worker's model can compute.

One row that the model cannot compute fails the step of all rows in it, so such a request is refused before it
enters (`malformed-is-contained`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.rooms.request import Request
from baton.wire.conversions import Malformed


@dataclass(frozen=True, slots=True)
class ModelBounds:
    vocabulary: int
    """Size of the vocabulary. Token ids lie in [0, vocabulary), and are unsigned on the wire and in a
    record."""
    context_tokens: int
    """Most tokens of prompt and output together."""
    whole_prompts: bool = False
    """Whether the engine computes a prompt in one row only (`EngineFacts.chunked_prompts`)."""

    def check(self, request: Request) -> None:
        """Check a request. Raises Malformed with the field, but without its tokens."""
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
