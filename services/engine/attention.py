"""How does a token look at the tokens before it, when those lie in pages?

The model library calls `paged_attention` in every layer; what the step at hand looks like comes from the
context that the engine enters around the model's forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.engine.kept import KeptGroup
from services.engine.kv_cache import PagedKvCache
from services.engine.paged import PagedRows
from services.engine.plan import Group, Plan, Prefixed, Whole

NAME: Final = "baton_paged"
MASK: Final = "attention_mask"
BLOCK: Final = 128
"""Tokens of a prompt that look at once, on a CPU: enough to multiply well, few enough to skip most of what
is later than they are."""


class Attend(Protocol):
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


_attend: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
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
    """The library's attention function. Outside `attending` a LookupError."""
    return _attend.get()(module, query, key, value, {**options, MASK: attention_mask}), None


AttentionInterface.register(NAME, paged_attention)


class PagedStep:
    """One step's attention: stores the new keys and values, then lets each row look at its own."""

    def __init__(self, plan: Plan, cache: PagedKvCache) -> None:
        self._plan = plan
        self._cache = cache

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        scaling = options.get("scaling")
        scaling = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        entries = torch.cat((key[0], value[0])).transpose(0, 1)
        # As the library's own attention gives it: some definitions take a view of it.
        return self.look(layer, query[0].transpose(0, 1), entries, scaling).contiguous()[None]

    def look(self, layer: int, query: torch.Tensor, entries: torch.Tensor, scaling: float) -> torch.Tensor:
        """`query` [T, query heads, head_dim], `entries` [T, 2 * kv heads, head_dim]: keys, then values.
        Returns [T, query heads, head_dim]."""
        plan = self._plan
        flat = entries.reshape(-1, entries.shape[2])
        self._cache.write(layer, plan.write, flat)
        if plan.alike is not None:
            return self._together(layer, plan.alike, query, flat, scaling)
        out = query.new_empty(query.shape)
        for group in plan.groups:
            span = slice(group.begin, group.end)
            own = entries[span].reshape(-1, entries.shape[2])
            out[span] = self._together(layer, group, query[span], own, scaling)
        kv_heads = entries.shape[1] // 2
        # [kv heads, query heads of each, T, head_dim]
        folded = query.view(len(query), kv_heads, -1, query.shape[2]).permute(1, 2, 0, 3)
        for row in plan.prefixed:
            self._cache.read(layer, row.pages, row.room)
            _look(out, folded, row, row.keys, row.values, row.mask, scaling)
        for whole in plan.wholes:
            own = entries[whole.begin : whole.end].transpose(0, 1)
            _look(out, folded, whole, own[:kv_heads], own[kv_heads:], None, scaling)
        return out

    def _together(
        self,
        layer: int,
        group: Group | KeptGroup | PagedRows,
        query: torch.Tensor,
        entries: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """By a kernel, or, of rows of one token each, the query heads that share a kv head are rows of one
        product."""
        if isinstance(group, PagedRows):
            return group.look(self._cache, layer, query, scaling)
        keys, values = group.look_up(self._cache, self._cache.places[layer], layer, entries)
        scores = torch.add(group.mask, torch.bmm(group.fold(query), keys), alpha=scaling)
        return group.unfold(torch.bmm(torch.softmax(scores, dim=-1), values))


def _look(
    out: torch.Tensor,
    folded: torch.Tensor,
    part: Prefixed | Whole,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> None:
    """One row's tokens, the last of those that have `keys` and `values` [kv heads, S, head_dim], which all
    query heads of a kv head share."""
    query = folded[:, :, part.begin : part.end]
    span = out[part.begin : part.end]
    if query.device.type == "cpu":
        _look_in_blocks(span, query, keys, values, scaling)
        return
    shape = (*query.shape[:2], *keys.shape[1:])
    seen = scaled_dot_product_attention(
        query,
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    span.copy_(seen.flatten(0, 1).transpose(0, 1))


def _look_in_blocks(
    out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> None:
    """Some tokens at a time, of all heads at once: torch's own attention on CPUs multiplies head by head and
    in smaller pieces, of which each costs as much as it computes."""
    kv_heads, shared, tokens, head_dim = query.shape
    before = keys.shape[1] - tokens
    keys, values = keys.transpose(1, 2).contiguous(), values.contiguous()
    hidden = query.new_full((BLOCK, BLOCK), float("-inf")).triu_(1)
    nothing = query.new_zeros(1, 1, 1)
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        count, stop = end - begin, before + end
        rows = query[:, :, begin:end].reshape(kv_heads, -1, head_dim)
        scores = torch.baddbmm(nothing, rows, keys[:, :, :stop], beta=0, alpha=scaling)
        scores.view(kv_heads, shared, count, stop)[..., -count:].add_(hidden[:count, :count])
        seen = torch.bmm(torch.softmax(scores, dim=-1), values[:, :stop])
        out[begin:end] = seen.view(kv_heads * shared, count, head_dim).transpose(0, 1)
