"""Limit on the prompt tokens of a prefill step whose thread also runs decode steps.

While sequences run on the decode side, the limit is the number of prompt tokens that the decode side itself
would add to its steps. So a prompt delays running sequences by the same time on either side of the process.
"""

from typing import Final, Protocol


class PromptBudget(Protocol):
    """Limit on the prompt tokens of a prefill step. A decode side whose steps run on the same thread sets
    it."""

    def chunk_tokens(self, most: int) -> int:
        """Return how many prompt tokens the next prefill step may compute: at least 1 and at most `most`."""

    def stepped(self, tokens: int, ms: float) -> None:
        """Record that a prefill step computed `tokens` prompt tokens in `ms` milliseconds."""


class FullBudget:
    """Prompt budget without a limit, for a prefill worker that has its step thread alone."""

    def chunk_tokens(self, most: int) -> int:
        return most

    def stepped(self, tokens: int, ms: float) -> None: ...


FULL_BUDGET: Final = FullBudget()
