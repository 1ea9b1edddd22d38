"""Options of a layer's attention: how far back its tokens see, soft caps, and sinks.

Some layers see a window of the last tokens, or the current chunk of the sequence only. Some cap their scores,
or let each head attend to nothing as well (a sink). `find_span` derives a span from the mask function that
the model's definition makes, at positions far behind any small forward pass.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import torch

Position = TypeVar("Position", int, torch.Tensor)
MaskFunction: TypeAlias = Callable[..., torch.Tensor]
"""(batch, head, query position, key position) -> whether that key is visible. All arguments are tensors."""

ATTENTION_NAME: Final = "baton_paged"
"""Name under which the model library finds our attention function."""
MASK: Final = "attention_mask"
"""Name of the mask among the options of an attention call."""
COLUMNS_MAX: Final = 2**18
"""Most key positions that are evaluated at once, and on each side of a border."""


class UnknownSpan(Exception):
    """A mask is neither causal, nor a window, nor a chunk."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a model's attention, the same in each of its layers."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Part of the context that a token sees, for a layer that does not see all of it."""

    tokens: int
    """Size of the window, the token itself included, or of a chunk."""
    in_chunks: bool = False
    """The sequence is cut into chunks, and a token sees its own chunk only."""

    def first(self, position: Position) -> Position:
        """Return the first position visible from `position`. Negative while a window is not full yet."""
        if self.in_chunks:
            return position - position % self.tokens
        return position - (self.tokens - 1)

    def binds(self, length: int) -> bool:
        """Return whether the span hides the first token from some later token, in a sequence of `length`
        tokens."""
        return length > self.tokens

    def hidden(self, positions: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return a boolean mask [positions, end - begin]: true for keys in [begin, end) that the span hides
        from a position."""
        return torch.arange(begin, end, device=positions.device) < self.first(positions)[:, None]

    def narrowed(self, most: int) -> "AttentionSpan":
        """Return the span with at most `most` tokens, so that a check needs only short sequences."""
        return AttentionSpan(min(self.tokens, most), self.in_chunks)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention options of one layer."""

    scaling: float
    """Factor of the scores."""
    span: AttentionSpan | None = None
    """None if tokens see everything before them."""
    softcap: float | None = None
    """Scaled scores s become softcap * tanh(s / softcap)."""
    sinks: torch.Tensor | None = None
    """[query heads]: the score of attending to nothing, beside the scores of tokens."""

    @property
    def is_plain(self) -> bool:
        """True if scores go to the softmax unchanged."""
        return self.softcap is None and self.sinks is None


def attention_options(query: torch.Tensor, options: Mapping[str, Any]) -> LayerAttention:
    """Return the options in the arguments of the definition's attention call, without the span.

    `query`: [1, query heads, T, head_dim]. `options`: keyword arguments of the call.
    """
    scaling = options.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    return LayerAttention(scaling, softcap=options.get("softcap") or None, sinks=options.get("s_aux"))


def find_span(function: MaskFunction, length: int) -> AttentionSpan | None:
    """Return the span that the mask function `function` gives in sequences of up to `length` tokens. None if
    it is plainly causal.

    Raises UnknownSpan.
    """
    last = length - 1
    edge = _first_visible(function, last)
    if edge == 0:
        guesses: list[AttentionSpan | None] = [None]
    else:
        before = _first_visible(function, edge - 1)
        guesses = [AttentionSpan(last - edge + 1), AttentionSpan(edge - before, in_chunks=True)]
    for guess in guesses:
        if all(_agrees(function, guess, position) for position in _positions_to_check(guess, length)):
            return guess
    raise UnknownSpan


def _positions_to_check(guess: AttentionSpan | None, length: int) -> Iterable[int]:
    """Yield query positions at which a span other than `guess` would show: around the first borders, and at
    the end."""
    borders = () if guess is None else (guess.tokens, 2 * guess.tokens, 3 * guess.tokens // 2)
    near = {0, 1, length // 2, length - 2, length - 1}
    near.update(border + step for border in borders for step in (-1, 0, 1))
    return (position for position in sorted(near) if 0 <= position < length)


def _first_visible(function: MaskFunction, position: int) -> int:
    """Return the first key position that is visible from `position`. Raises UnknownSpan."""
    for begin in range(0, position + 1, COLUMNS_MAX):
        visible = _mask_row(function, position, begin, min(begin + COLUMNS_MAX, position + 1))
        if bool(visible.any()):
            return begin + int(visible.int().argmax())
    raise UnknownSpan


def _agrees(function: MaskFunction, guess: AttentionSpan | None, position: int) -> bool:
    """Return whether exactly the keys of `guess` are visible from `position`. Only keys around both ends are
    checked."""
    first = 0 if guess is None else max(guess.first(position), 0)
    for border in (first, position):
        begin, end = max(border - COLUMNS_MAX, 0), min(border + COLUMNS_MAX, position + 3)
        columns = torch.arange(begin, end)
        expected = (columns >= first) & (columns <= position)
        if not _mask_row(function, position, begin, end).equal(expected):
            return False
    return True


def _mask_row(function: MaskFunction, position: int, begin: int, end: int) -> torch.Tensor:
    zero = torch.tensor(0)
    visible: Any = function(zero, zero, torch.tensor(position), torch.arange(begin, end))
    return torch.as_tensor(visible).expand(end - begin)
