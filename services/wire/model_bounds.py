"""Which requests can this worker's model compute at all?

One row that the model cannot compute fails the step of everyone in it, so it is refused before it enters
(`malformed-is-contained`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.rooms.request import Request
from baton.wire.conversions import Malformed


@dataclass(frozen=True, slots=True)
class ModelBounds:
    vocabulary: int
    """Token ids lie in [0, vocabulary). On the wire and in a record they are unsigned."""
    context_tokens: int
    """Prompt plus output."""

    def check(self, request: Request) -> None:
        """Raises Malformed, naming the field but no token."""
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
