"""Which of the tokens before it does a token of a layer look at, and how?

Some layers of some models see a window of the last tokens, or the current chunk of the sequence alone; some
bound the scores, or let each head look at nothing as well (a sink). What a layer sees is asked of the mask
function that the model's definition makes for it, at places far behind any small pass: `find_span`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import torch

Position = TypeVar("Position", int, torch.Tensor)
MaskFunction: TypeAlias = Callable[..., torch.Tensor]
"""(batch, head, query's position, key's position) -> whether that key is seen. Of tensors."""

COLUMNS_MAX: Final = 2**18
"""Places before one query that are asked for at once, and on each side of a border."""


class UnknownSpan(Exception):
    """A mask is neither everything before a token, nor a window, nor a chunk of it."""


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """How far back a token sees, where that is not to the beginning."""

    tokens: int
    """The last so many, its own among them; or those of its chunk, of which each has so many."""
    in_chunks: bool = False

    def first(self, position: Position) -> Position:
        """The first position that is seen from `position`; of a window negative where it is not full yet."""
        if self.in_chunks:
            return position - position % self.tokens
        return position - (self.tokens - 1)

    def binds(self, length: int) -> bool:
        """Whether in a sequence of so many tokens one does not see the first."""
        return length > self.tokens

    def hidden(self, positions: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """[positions, end - begin]: which of the places [begin, end) come before what each position sees."""
        return torch.arange(begin, end, device=positions.device) < self.first(positions)[:, None]

    def narrowed(self, most: int) -> "Reach":
        """The same over so many tokens at most: what is past its border is seen in short sequences."""
        return AttentionSpan(min(self.tokens, most), self.in_chunks)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How the tokens of one layer look."""

    scaling: float
    """Of the scores."""
    reach: AttentionSpan | None = None
    """None: to the beginning."""
    cap: float | None = None
    """Scores s, scaled, become cap * tanh(s / cap)."""
    sinks: torch.Tensor | None = None
    """[query heads]: the score that each head gives to nothing, beside those of the tokens."""

    @property
    def plain(self) -> bool:
        """Its scores are weighed as they are."""
        return self.cap is None and self.sinks is None


def find_span(function: MaskFunction, length: int) -> AttentionSpan | None:
    """What `function` lets a token see in sequences of up to `length` tokens; None where it sees everything
    up to itself. Raises UnknownSpan."""
    last = length - 1
    edge = _first(function, last)
    if edge == 0:
        guesses: list[AttentionSpan | None] = [None]
    else:
        before = _first(function, edge - 1)
        guesses = [AttentionSpan(last - edge + 1), AttentionSpan(edge - before, in_chunks=True)]
    for guess in guesses:
        if all(_sees(function, guess, place) for place in _places(guess, length)):
            return guess
    raise UnknownSpan


def _places(guess: AttentionSpan | None, length: int) -> Iterable[int]:
    """Where another reach would be seen: around its first borders, and at the end."""
    borders = () if guess is None else (guess.tokens, 2 * guess.tokens, 3 * guess.tokens // 2)
    near = {0, 1, length // 2, length - 2, length - 1}
    near.update(border + step for border in borders for step in (-1, 0, 1))
    return (place for place in sorted(near) if 0 <= place < length)


def _first(function: MaskFunction, place: int) -> int:
    """The first place that is seen from `place`."""
    for begin in range(0, place + 1, COLUMNS_MAX):
        seen = _row(function, place, begin, min(begin + COLUMNS_MAX, place + 1))
        if bool(seen.any()):
            return begin + int(seen.int().argmax())
    raise UnknownSpan


def _sees(function: MaskFunction, guess: AttentionSpan | None, place: int) -> bool:
    """Whether from `place` that is seen which `guess` says, and nothing later: at both ends of it."""
    first = 0 if guess is None else max(guess.first(place), 0)
    for border in (first, place):
        begin, end = max(border - COLUMNS_MAX, 0), min(border + COLUMNS_MAX, place + 3)
        columns = torch.arange(begin, end)
        right = (columns >= first) & (columns <= place)
        if not _row(function, place, begin, end).equal(right):
            return False
    return True


def _row(function: MaskFunction, place: int, begin: int, end: int) -> torch.Tensor:
    nothing = torch.tensor(0)
    seen: Any = function(nothing, nothing, torch.tensor(place), torch.arange(begin, end))
    return torch.as_tensor(seen).expand(end - begin)
