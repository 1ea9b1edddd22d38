"""Attention options of a layer: how far back its tokens attend, soft caps, and sinks.

Some layers attend to a window of the last tokens, or to the current chunk of the sequence only. Some cap
their scores, or let each head attend to nothing as well (a sink). `find_span` derives the span from the mask
function in the model's transformers implementation, at positions beyond the length of any small forward pass.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias, TypeVar

import torch

from baton.pages.layout import KvGroup, KvPlane, full_group, latent_group, state_group

Position = TypeVar("Position", int, torch.Tensor)
MaskFunction: TypeAlias = Callable[..., torch.Tensor]
"""Function (batch, head, query position, key position) that returns whether the query may attend to the key.

All arguments are tensors.
"""

ATTENTION_NAME: Final = "baton_paged"
"""Name under which our attention function is registered with the transformers library."""
MASK: Final = "attention_mask"
"""Name of the mask among the keyword arguments of an attention call."""
COLUMNS_MAX: Final = 2**18
"""Most key positions for which a mask function is evaluated in one call. Also the number of key positions
that are checked on each side of a span's border."""


class UnknownSpan(Exception):
    """A layer's mask is of none of the supported kinds: causal, sliding window or chunk."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One state tensor that a layer stores of a sequence, such as the last inputs of a convolution."""

    name: str
    shape: tuple[int, ...]
    """Its dimensions, without that of the batch."""
    dtype: torch.dtype
    """Number format in which the layer computes with it. Pages store float32."""


@dataclass(frozen=True, slots=True)
class LayerStates:
    """State tensors of the layers that have the same ones. They form one KV group."""

    layers: tuple[int, ...]
    tensors: tuple[StateTensor, ...]

    def kv_group(self, context_length: int) -> KvGroup:
        """Return the KV group of these layers. Float32 holds the numbers of every other format."""
        planes = tuple(KvPlane(each.name, prod(each.shape)) for each in self.tensors)
        return state_group("float32", context_length, self.layers, (0,), planes)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of what a model's layers store of a sequence.

    Those of attention are the same in each layer that has it.
    """

    layers: int
    query_heads: int
    kv_heads: int
    """Number of KV heads in pages. 1 with latents, which all query heads share."""
    head_dim: int
    latent: tuple[int, int] | None = None
    """Elements of a token's compressed keys and values, and of its rotated key, if pages store these instead
    of keys and values (MLA)."""
    attention_layers: tuple[int, ...] | None = None
    """Ids of the layers that store keys and values, or None if all do."""
    states: tuple[LayerStates, ...] = ()
    """State tensors by the layers that have them."""

    @property
    def state_tensors(self) -> Mapping[int, tuple[StateTensor, ...]]:
        """State tensors by layer id, of the layers that have some."""
        return {layer: each.tensors for each in self.states for layer in each.layers}

    def groups(self, dtype: str, page_tokens: int, context_length: int) -> tuple[KvGroup, ...]:
        """Return the KV groups of all layers: that of attention, if any layer has it, then those of
        states."""
        attention = () if self.attention_layers == () else (self.kv_group(dtype, page_tokens),)
        return (*attention, *(each.kv_group(context_length) for each in self.states))

    def kv_group(self, dtype: str, page_tokens: int) -> KvGroup:
        """Return the KV group of attention, with all heads."""
        layers = tuple(range(self.layers)) if self.attention_layers is None else self.attention_layers
        if self.latent is not None:
            return latent_group(dtype, page_tokens, layers, sum(self.latent))
        return full_group(dtype, page_tokens, layers, tuple(range(self.kv_heads)), self.head_dim)


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """The part of the preceding context to which a token attends, in a layer that does not attend to all of
    it."""

    tokens: int
    """Number of tokens in the sliding window, the current token included, or in a chunk."""
    in_chunks: bool = False
    """Whether the sequence is cut into chunks and a token attends to its own chunk only, instead of a
    window."""

    def first(self, position: Position) -> Position:
        """Return the first key position that is visible from `position`. Negative while a window is not full
        yet."""
        if self.in_chunks:
            return position - position % self.tokens
        return position - (self.tokens - 1)

    def binds(self, length: int) -> bool:
        """Return whether the span has any effect in a sequence of `length` tokens."""
        return length > self.tokens

    def hidden(self, positions: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return a boolean mask [positions, end - begin] of the keys in [begin, end) that the span hides.

        It is true for keys before the first one that the query position may attend to.
        """
        return torch.arange(begin, end, device=positions.device) < self.first(positions)[:, None]

    def narrowed(self, most: int) -> "AttentionSpan":
        """Return a shorter span of at most `most` tokens, so that a check needs only short sequences."""
        return AttentionSpan(min(self.tokens, most), self.in_chunks)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Options of one layer's attention: the factor of its scores, span, soft cap and sinks."""

    scaling: float
    """Factor of the attention scores."""
    span: AttentionSpan | None = None
    """Part of the context to which tokens attend, or None if they attend to all earlier tokens."""
    softcap: float | None = None
    """Bound of the scaled scores, or None: a score s becomes softcap * tanh(s / softcap)."""
    sinks: torch.Tensor | None = None
    """Scores [query heads] of attending to nothing, in addition to the scores of tokens. None without
    sinks."""

    @property
    def is_plain(self) -> bool:
        """Whether the scaled scores go to the softmax unchanged, without soft cap and sinks."""
        return self.softcap is None and self.sinks is None


def attention_options(query: torch.Tensor, options: Mapping[str, Any]) -> LayerAttention:
    """Return a layer's attention options, read from the arguments of an attention call. The span is not set.

    `query`: [1, query heads, T, head_dim]. `options`: keyword arguments of the call.
    """
    scaling = options.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    return LayerAttention(scaling, softcap=options.get("softcap") or None, sinks=options.get("s_aux"))


def find_span(function: MaskFunction, length: int) -> AttentionSpan | None:
    """Return the attention span of a mask function, for sequences of up to `length` tokens.

    None if the mask is plainly causal. Raises UnknownSpan if it is of another kind.
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
    """Return query positions at which a mask that differs from the span `guess` would show it.

    These lie around the first borders of windows or chunks, and at the end.
    """
    borders = () if guess is None else (guess.tokens, 2 * guess.tokens, 3 * guess.tokens // 2)
    near = {0, 1, length // 2, length - 2, length - 1}
    near.update(border + step for border in borders for step in (-1, 0, 1))
    return (position for position in sorted(near) if 0 <= position < length)


def _first_visible(function: MaskFunction, position: int) -> int:
    """Return the first key position to which a query at `position` may attend. Raises UnknownSpan if there is
    none."""
    for begin in range(0, position + 1, COLUMNS_MAX):
        visible = _mask_row(function, position, begin, min(begin + COLUMNS_MAX, position + 1))
        if bool(visible.any()):
            return begin + int(visible.int().argmax())
    raise UnknownSpan


def _agrees(function: MaskFunction, guess: AttentionSpan | None, position: int) -> bool:
    """Return whether the mask function lets `position` attend to exactly the keys of the span `guess`.

    Only keys around both ends of the span are checked.
    """
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
