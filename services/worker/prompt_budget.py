"""How much of prompts may a step of prefill compute, where decode's steps wait for it on the same thread?

As much as a decode worker computes beside the sequences that run there, while any do: so a prompt holds these
up for as long at most, whichever side of the process computes it.
"""

from typing import Final, Protocol


class PromptBudget(Protocol):
    """Who else has steps made on a prefill worker's thread."""

    def chunk_tokens(self, most: int) -> int:
        """Of `most` tokens that a step would compute by itself, at least one."""

    def stepped(self, tokens: int, ms: float) -> None:
        """A step computed so many tokens of prompts, and took so long."""


class FullBudget:
    """The thread is the worker's alone."""

    def chunk_tokens(self, most: int) -> int:
        return most

    def stepped(self, tokens: int, ms: float) -> None: ...


FULL_BUDGET: Final = FullBudget()
