"""Attention over KV pages, as the transformers implementations call it in every layer.

The library finds `paged_attention` by its registered name. `use_attention` sets the function that it calls in
a forward pass.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from baton.engine.execution.attention_span import (
    ATTENTION_NAME,
    MASK,
    AttentionSpan,
    LayerAttention,
    attention_options,
)
from baton.engine.execution.step_plan import AttentionMetadata, ContinuedRow, DecodeGroup, FirstRow
from baton.engine.kv_cache import PagedKvCache

BLOCK: Final = 128
"""Number of a prompt's tokens that attend together on a CPU: enough to multiply well, few enough to skip most
later keys."""


class AttentionFunction(Protocol):
    """Function that our registered attention calls in each layer of one forward pass, in order to compute
    attention."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Return the attention results [1, T, query heads, head_dim].

        `query`: [1, query heads, T, head_dim]. `key`, `value`: [1, kv heads, T, head_dim].
        `options`: all other arguments that the model's transformers implementation passes to its attention.
        """


_attend: ContextVar[AttentionFunction] = ContextVar("attend")


@contextmanager
def use_attention(attend: AttentionFunction) -> Iterator[None]:
    """Make transformers implementations that use our attention call the function `attend` within the context,
    on this
    thread.
    """
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Pass the transformers library's attention call on to the function that `use_attention` has set.

    Raises LookupError outside such a context.
    """
    return _attend.get()(module, query, key, value, {**options, MASK: attention_mask}), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class PagedAttention:
    """Attention of one step: stores new keys and values in pages, then attends row by row or in groups of
    rows."""

    def __init__(
        self, plan: AttentionMetadata, cache: PagedKvCache, spans: Mapping[int, AttentionSpan]
    ) -> None:
        """Prepare the attention of one step.

        `spans`: attention spans by layer id. Layers not in it attend to all earlier tokens.
        """
        self._plan = plan
        self._cache = cache
        self._spans = spans

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        entries = torch.cat((key[0], value[0])).transpose(0, 1)
        attention = attention_options(query, options)
        # Contiguous as from the library's own attention: some definitions take a view of it.
        return self.attend(layer, query[0].transpose(0, 1), entries, attention).contiguous()[None]

    def attend(
        self, layer: int, query: torch.Tensor, entries: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        """Store the step's keys and values of a layer in its pages, and return the attention results.

        Their shape is [T, query heads, head_dim], as that of `query`. `layer`: id of the layer. `entries`:
        [T, planes * kv heads, head_dim], keys before values. `attention`: options of the layer, without its
        span.
        """
        attention = self._with_span(layer, attention)
        plan = self._plan
        self._cache.write(layer, plan.write, entries.reshape(-1, entries.shape[2]))
        if plan.only_group is not None:
            return self._attend_group(layer, plan.only_group, query, attention)
        out = query.new_empty(query.shape)
        for group in plan.groups:
            part = slice(group.begin, group.end)
            out[part] = self._attend_group(layer, group, query[part], attention)
        kv_heads = len(self._cache.group.heads)
        # [kv heads, query heads per kv head, T, head_dim]
        folded = query.view(len(query), kv_heads, -1, query.shape[2]).permute(1, 2, 0, 3)
        for row in plan.continued:
            self._cache.read(layer, row.pages, row.buffer)
            attend_row(out, folded, row, row.keys, row.values, attention)
        for first in plan.firsts:
            own = entries[first.begin : first.end].transpose(0, 1)
            attend_row(out, folded, first, own[:kv_heads], own[kv_heads:], attention)
        return out

    def _with_span(self, layer: int, attention: LayerAttention) -> LayerAttention:
        return replace(attention, span=self._spans[layer]) if layer in self._spans else attention

    def _attend_group(
        self, layer: int, group: DecodeGroup, query: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        """Return the attention results of the rows of `group`, which are computed together.

        Query heads that share a KV head are rows of one matrix in one batched product.
        """
        self._cache.read(layer, group.pages, group.buffer)
        scores = torch.bmm(group.fold(query), group.keys.transpose(1, 2))
        mask = group.masks.of(attention.span)
        if attention.is_plain:
            weights = torch.softmax(torch.add(mask, scores, alpha=attention.scaling), dim=-1)
        else:
            sinks = None
            if attention.sinks is not None:
                sinks = group.fold(attention.sinks[None, :, None].expand(len(query), -1, 1))
            weights = _weights(_capped(scores.mul_(attention.scaling), attention).add_(mask), sinks)
        return group.unfold(torch.bmm(weights, group.values))


def _capped(scores: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
    """Apply the layer's soft cap to `scores` in place, if it has one."""
    cap = attention.softcap
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of `scores` [matrices, rows, S], with `sinks` as one more key that is left out
    after.

    `sinks`: [matrices, rows, 1], or None.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat((scores, sinks.to(scores.dtype)), dim=-1), dim=-1)[..., :-1]


def attend_row(
    out: torch.Tensor,
    folded: torch.Tensor,
    part: ContinuedRow | FirstRow,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention: LayerAttention,
) -> None:
    """Compute attention of one row's tokens, which are the last of `keys` and `values` [kv heads, S,
    head_dim].

    Writes the results to `out`. All query heads of a KV head share its keys and values.
    """
    query = folded[:, :, part.begin : part.end]
    target = out[part.begin : part.end]
    if query.device.type == "cpu" or not attention.is_plain:
        _attend_in_blocks(target, query, keys, values, attention)
        return
    span = attention.span
    is_causal = isinstance(part, FirstRow) and not (span and span.binds(keys.shape[1]))
    keys, values = (each[:, None].expand(*query.shape[:2], *each.shape[1:]) for each in (keys, values))
    attended = scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=None if is_causal else part.masks.of(span),
        is_causal=is_causal,
        scale=attention.scaling,
    )
    target.copy_(attended.flatten(0, 1).transpose(0, 1))


def _attend_in_blocks(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention: LayerAttention,
) -> None:
    """Compute attention of one row's tokens, BLOCK at a time with all heads at once.

    Keys to which no token of a block attends are skipped. torch's own attention on CPUs multiplies head by
    head and in smaller pieces, whose overhead is as large as their computation.
    """
    kv_heads, shared, tokens, head_dim = query.shape
    width = values.shape[2]
    before = keys.shape[1] - tokens
    keys, values = keys.transpose(1, 2).contiguous(), values.contiguous()
    later = query.new_full((BLOCK, BLOCK), float("-inf")).triu_(1)
    zero = query.new_zeros(1, 1, 1)
    span = attention.span
    if span is not None and not span.binds(keys.shape[2]):
        span = None
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        count, stop = end - begin, before + end
        first = 0 if span is None else max(span.first(before + begin), 0)
        rows = query[:, :, begin:end].reshape(kv_heads, -1, head_dim)
        scores = torch.baddbmm(zero, rows, keys[:, :, first:stop], beta=0, alpha=attention.scaling)
        by_token = _capped(scores, attention).view(kv_heads, shared, count, stop - first)
        by_token[..., -count:].add_(later[:count, :count])
        if span is not None and span.first(stop - 1) > first:
            positions = torch.arange(before + begin, stop, device=query.device)
            by_token.masked_fill_(span.hidden(positions, first, stop), float("-inf"))
        sinks = attention.sinks
        if sinks is not None:
            sinks = sinks.view(kv_heads, shared, 1, 1).expand(-1, -1, count, 1).reshape(kv_heads, -1, 1)
        attended = torch.bmm(_weights(scores, sinks), values[:, first:stop])
        out[begin:end] = attended.view(kv_heads * shared, count, width).transpose(0, 1)
