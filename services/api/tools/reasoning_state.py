"""State of a model's reasoning at the end of a prompt: not begun, open or closed."""

from collections.abc import Sequence
from enum import Enum
from typing import Final

from baton.api.requests.meaning import Meaning
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.parsing.output_markup import OutputMarkup, RegionKind

TAIL_TOKENS: Final = 16
"""Number of tokens at a prompt's end in which a mark of reasoning (`<think>` or `</think>`) is looked for."""


class ReasoningState(Enum):
    """State of the model's reasoning block at the end of a prompt: whether it has been opened or closed, or
    may still begin."""

    NONE = "none"
    """State in which reasoning is not separated from content: the model has none, or the request turns this
    off."""
    WITHIN = "within"
    """State in which the prompt ends inside an open reasoning block, so that the answer begins with
    reasoning."""
    CLOSED = "closed"
    """State in which the prompt has already closed the reasoning block, so that the answer has no reasoning.
    """
    FREE = "free"
    """State in which the answer may still begin with a reasoning block."""


def reasoning_state(
    meaning: Meaning, prompt: Sequence[int], markup: OutputMarkup | None, tokenizer: Tokenizer
) -> ReasoningState:
    """Return the state of the model's reasoning block at the end of a prompt.

    `prompt`: token ids. `markup`: marks around the model's reasoning, or None if the model has no reasoning.
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
