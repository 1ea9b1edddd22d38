"""Echo of a prompt in its response: its text before the answer, and the log-probabilities of its tokens.

Clients ask for it by the fields `echo` and `prompt_logprobs`, as in vLLM. The choices of one prompt share its
echo.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.rooms.request import Score


@dataclass(slots=True)
class PromptEcho:
    """Text and log-probabilities of one prompt that its response shows."""

    prompt: Sequence[int]
    text: str | None = None
    """Text of the prompt that is put before the answer's text. None: it is not shown."""
    offsets: Sequence[int] = ()
    """For each token of the prompt, the number of characters of the text before it."""
    is_alone: bool = False
    """Whether the response consists of the prompt only, because the client asked for no output tokens."""
    scores: Sequence[Score] = ()
    """Log-probabilities of the prompt's tokens, from the second token on. Empty until the first batch of
    output tokens, and if the client did not ask for them."""

    @property
    def entries(self) -> int:
        """Number of log-probabilities that the response shows for the prompt: of its tokens and of their
        alternatives."""
        return len(self.scores) * (1 + len(self.scores[0].top)) if self.scores else 0
