"""The prompt as a part of its answers: its text before theirs, and the log-probabilities of its tokens.

`echo` and `prompt_logprobs`, as in vLLM. The choices of one prompt share its echo.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.rooms.request import Score


@dataclass(slots=True)
class PromptEcho:
    """What the answers to one prompt show of it."""

    prompt: Sequence[int]
    text: str | None = None
    """Text before an answer's. None: no text is shown."""
    offsets: Sequence[int] = ()
    """Characters of the text before each token of the prompt."""
    is_alone: bool = False
    """Whether nothing of an answer follows."""
    scores: Sequence[Score] = ()
    """Scores of the prompt's tokens but the first, once they are known. Empty: they are not scored."""

    @property
    def entries(self) -> int:
        """Number of log-probabilities that are shown."""
        return len(self.scores) * (1 + len(self.scores[0].top)) if self.scores else 0
