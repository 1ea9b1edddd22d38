"""Limit on the prompt tokens of a prefill step whose thread also runs decode steps.

While sequences run on the decode side, the limit is what that side computes of prompts beside them. So a
prompt delays running sequences by the same time on either side of the process.
"""

from typing import Final, Protocol


class PromptBudget(Protocol):
    """Limit set by another side whose steps run on the thread of a prefill worker."""

    def chunk_tokens(self, most: int) -> int:
        """Return how many of `most` tokens a step may compute, at least one."""

    def stepped(self, tokens: int, ms: float) -> None:
        """Note that a step computed `tokens` prompt tokens in `ms` milliseconds."""


class FullBudget:
    """No limit: the thread belongs to the worker alone."""

    def chunk_tokens(self, most: int) -> int:
        return most

    def stepped(self, tokens: int, ms: float) -> None: ...


FULL_BUDGET: Final = FullBudget()
