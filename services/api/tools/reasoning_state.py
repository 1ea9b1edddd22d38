"""State of a model's reasoning at the end of a prompt: not begun, open or closed."""

from collections.abc import Sequence
from enum import Enum
from typing import Final

from baton.api.requests.meaning import Meaning
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.parsing.output_markup import OutputMarkup, RegionKind

TAIL_TOKENS: Final = 16
"""Last tokens of a prompt, in which its chat template may have opened the reasoning."""


class ReasoningState(Enum):
    """State of the reasoning at the end of a prompt."""

    NONE = "none"
    """Reasoning is not separated from content."""
    WITHIN = "within"
    """The prompt ends within reasoning."""
    CLOSED = "closed"
    """The prompt has closed the reasoning, so that the answer has none."""
    FREE = "free"
    """The answer may begin with reasoning."""


def reasoning_state(
    meaning: Meaning, prompt: Sequence[int], markup: OutputMarkup | None, tokenizer: Tokenizer
) -> ReasoningState:
    """Return the state of the reasoning at the end of a prompt.

    `markup`: marks of the model's reasoning. None if it has no reasoning.
    """
    if markup is None or not meaning.reasoning.is_parsed:
        return ReasoningState.NONE
    end = meaning.continued
    if end is None:
        end = tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    for region in markup.regions:
        opened = max(map(end.rfind, region.opens), default=-1)
        closed = max(map(end.rfind, region.closes), default=-1)
        if region.kind is not RegionKind.REASONING:
            continue
        if opened > closed and (meaning.continued is not None or end.endswith(region.opens)):
            return ReasoningState.WITHIN
        if end.endswith(region.closes):
            return ReasoningState.CLOSED
    return ReasoningState.FREE
