"""Which sequences of differing length are computed together?

One product serves several, at the length of the longest: the others are filled up. That costs less than the
calls of another group do, up to some padding, which a mask hides.
"""

from collections import abc
from typing import Final

import torch

from baton.engine.execution.attention_span import AttentionSpan

PADDING_MAX: Final = 24
"""Pages. To fetch and to look at so many takes as long as the calls of another group do."""


def groups_of_similar_length(pages: abc.Sequence[int]) -> list[int]:
    """Cut a descending list of page counts where padding to the longest costs more than another group does:
    where each group ends."""
    ends: list[int] = []
    longest = padding = 0
    for place, count in enumerate(pages):
        padding += longest - count
        if place == 0 or padding > PADDING_MAX:
            if place:
                ends.append(place)
            longest, padding = count, 0
    return [*ends, len(pages)] if pages else []


def alike(pages: abc.Sequence[int]) -> bool:
    """Whether sequences of so many pages, in any order, may be one group."""
    return len(pages) * max(pages) - sum(pages) <= PADDING_MAX


def mask(
    positions: torch.Tensor, width: int, like: torch.Tensor, reach: AttentionSpan | None = None
) -> torch.Tensor:
    """[positions, width], of the dtype of `like`: 0 up to each position, as far back as `reach` says, -inf
    elsewhere."""
    hidden = torch.arange(width, device=positions.device) > positions[:, None]
    if reach is not None:
        hidden |= reach.hidden(positions, 0, width)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


class Masks:
    """Of a step's tokens at the same positions, for each reach that a layer has. One is made when the first
    layer asks for it."""

    def __init__(self, make: abc.Callable[[AttentionSpan | None], torch.Tensor], width: int) -> None:
        """`make`: gives one over `width` positions."""
        self._make = make
        self._width = width
        self._made: dict[AttentionSpan | None, torch.Tensor] = {}

    def of(self, reach: AttentionSpan | None) -> torch.Tensor:
        """One that is not narrower than all positions is that of all."""
        if reach is not None and not reach.binds(self._width):
            reach = None
        if reach not in self._made:
            self._made[reach] = self._make(reach)
        return self._made[reach]
