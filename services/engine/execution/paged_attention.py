"""How does a token look at the tokens before it, when those lie in pages?

The model library calls `paged_attention` in every layer; what the step at hand looks like comes from the
context that the engine enters around the model's forward pass.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from baton.engine.execution.attention_span import AttentionSpan, LayerAttention
from baton.engine.execution.kept import WorkspaceGroup
from baton.engine.execution.paged_rows import PagedRows
from baton.engine.execution.step_plan import AttentionMetadata, ContinuedRow, DecodeGroup, Whole
from baton.engine.kv_cache import PagedKvCache

NAME: Final = "baton_paged"
MASK: Final = "attention_mask"
BLOCK: Final = 128
"""Tokens of a prompt that look at once, on a CPU: enough to multiply well, few enough to skip most of what
is later than they are."""


class AttentionFunction(Protocol):
    """What one forward pass does in each layer."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """`query` [1, query heads, T, head_dim], `key` and `value` [1, kv heads, T, head_dim].

        `options`: whatever else the model's definition asks of its attention. Returns [1, T, query heads,
        head_dim].
        """


_attend: ContextVar[AttentionFunction] = ContextVar("attend")


@contextmanager
def use_attention(attend: AttentionFunction) -> Iterator[None]:
    """Within it, and in this thread, models loaded with our attention use `attend`."""
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
    """The library's attention function. Outside `use_attention` a LookupError."""
    return _attend.get()(module, query, key, value, {**options, MASK: attention_mask}), None


AttentionInterface.register(NAME, paged_attention)


class PagedAttention:
    """One step's attention: stores the new keys and values, then lets each row look at its own."""

    def __init__(
        self, plan: AttentionMetadata, cache: PagedKvCache, reaches: Mapping[int, AttentionSpan]
    ) -> None:
        """`reaches`: of the layers, by id, whose tokens do not see all before them."""
        self._plan = plan
        self._cache = cache
        self._reaches = reaches

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
        sight = attention_options(query, options)
        # As the library's own attention gives it: some definitions take a view of it.
        return self.look(layer, query[0].transpose(0, 1), entries, sight).contiguous()[None]

    def look(
        self, layer: int, query: torch.Tensor, entries: torch.Tensor, sight: LayerAttention
    ) -> torch.Tensor:
        """`query` [T, query heads, head_dim], `entries` [T, planes * kv heads, head_dim]: keys, then values.
        `sight`: the layer's, but for how far back it sees. Returns [T, query heads, head_dim]."""
        if layer in self._reaches:
            sight = replace(sight, reach=self._reaches[layer])
        plan = self._plan
        flat = entries.reshape(-1, entries.shape[2])
        self._cache.write(layer, plan.write, flat)
        if plan.alike is not None:
            return self._together(layer, plan.alike, query, flat, sight)
        out = query.new_empty(query.shape)
        for group in plan.groups:
            span = slice(group.begin, group.end)
            own = entries[span].reshape(-1, entries.shape[2])
            out[span] = self._together(layer, group, query[span], own, sight)
        kv_heads = len(self._cache.group.heads)
        # [kv heads, query heads of each, T, head_dim]
        folded = query.view(len(query), kv_heads, -1, query.shape[2]).permute(1, 2, 0, 3)
        for row in plan.prefixed:
            self._cache.read(layer, row.pages, row.room)
            _look(out, folded, row, row.keys, row.values, sight)
        for whole in plan.wholes:
            own = entries[whole.begin : whole.end].transpose(0, 1)
            _look(out, folded, whole, own[:kv_heads], own[kv_heads:], sight)
        return out

    def _together(
        self,
        layer: int,
        group: DecodeGroup | WorkspaceGroup | PagedRows,
        query: torch.Tensor,
        entries: torch.Tensor,
        sight: LayerAttention,
    ) -> torch.Tensor:
        """By a kernel, or, of rows of one token each, the query heads that share a kv head are rows of one
        product."""
        if isinstance(group, PagedRows):
            return group.look(self._cache, layer, query, sight)
        keys, values = group.look_up(self._cache, self._cache.places[layer], layer, entries)
        scores, mask = torch.bmm(group.fold(query), keys), group.masks.of(sight.reach)
        if sight.plain:
            weights = torch.softmax(torch.add(mask, scores, alpha=sight.scaling), dim=-1)
        else:
            sinks = None if sight.sinks is None else sight.sinks[None, :, None].expand(len(query), -1, 1)
            scores = _capped(scores.mul_(sight.scaling), sight).add_(mask)
            weights = _weighed(scores, None if sinks is None else group.fold(sinks))
        return group.unfold(torch.bmm(weights, values))


def attention_options(query: torch.Tensor, options: Mapping[str, Any]) -> LayerAttention:
    """How a call with these options of its own asks for tokens to look, but for how far back."""
    scaling = options.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    return LayerAttention(scaling, cap=options.get("softcap") or None, sinks=options.get("s_aux"))


def _capped(scores: torch.Tensor, sight: LayerAttention) -> torch.Tensor:
    """In place."""
    return scores if sight.cap is None else scores.div_(sight.cap).tanh_().mul_(sight.cap)


def _weighed(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The weights of the tokens, of `scores` [matrices, rows, S] and `sinks` [matrices, rows, 1]."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat((scores, sinks.to(scores.dtype)), dim=-1), dim=-1)[..., :-1]


def _look(
    out: torch.Tensor,
    folded: torch.Tensor,
    part: ContinuedRow | Whole,
    keys: torch.Tensor,
    values: torch.Tensor,
    sight: LayerAttention,
) -> None:
    """One row's tokens, the last of those that have `keys` and `values` [kv heads, S, head_dim], which all
    query heads of a kv head share."""
    query = folded[:, :, part.begin : part.end]
    span = out[part.begin : part.end]
    if query.device.type == "cpu" or not sight.plain:
        _look_in_blocks(span, query, keys, values, sight)
        return
    shape = (*query.shape[:2], *keys.shape[1:])
    sees_all = isinstance(part, Whole) and not (sight.reach and sight.reach.binds(keys.shape[1]))
    seen = scaled_dot_product_attention(
        query,
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=None if sees_all else part.masks.of(sight.reach),
        is_causal=sees_all,
        scale=sight.scaling,
    )
    span.copy_(seen.flatten(0, 1).transpose(0, 1))


def _look_in_blocks(
    out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: LayerAttention
) -> None:
    """Some tokens at a time, of all heads at once: torch's own attention on CPUs multiplies head by head and
    in smaller pieces, of which each costs as much as it computes. What none of them sees is left out."""
    kv_heads, shared, tokens, head_dim = query.shape
    before = keys.shape[1] - tokens
    keys, values = keys.transpose(1, 2).contiguous(), values.contiguous()
    hidden = query.new_full((BLOCK, BLOCK), float("-inf")).triu_(1)
    nothing = query.new_zeros(1, 1, 1)
    reach = sight.reach if sight.reach is not None and sight.reach.binds(keys.shape[2]) else None
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        count, stop = end - begin, before + end
        first = 0 if reach is None else max(reach.first(before + begin), 0)
        rows = query[:, :, begin:end].reshape(kv_heads, -1, head_dim)
        scores = torch.baddbmm(nothing, rows, keys[:, :, first:stop], beta=0, alpha=sight.scaling)
        by_token = _capped(scores, sight).view(kv_heads, shared, count, stop - first)
        by_token[..., -count:].add_(hidden[:count, :count])
        if reach is not None and reach.first(stop - 1) > first:
            places = torch.arange(before + begin, stop, device=query.device)
            by_token.masked_fill_(reach.hidden(places, first, stop), float("-inf"))
        sinks = sight.sinks
        if sinks is not None:
            sinks = sinks.view(kv_heads, shared, 1, 1).expand(-1, -1, count, 1).reshape(kv_heads, -1, 1)
        seen = torch.bmm(_weighed(scores, sinks), values[:, first:stop])
        out[begin:end] = seen.view(kv_heads * shared, count, head_dim).transpose(0, 1)
