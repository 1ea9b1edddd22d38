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

from services.engine.kv_cache import PagedKvCache
from services.engine.plan import Group, Plan, Whole

NAME: Final = "baton_paged"
MASK: Final = "attention_mask"


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
        head_dim = query.shape[3]
        self._cache.write(
            layer,
            self._plan.write,
            key[0].transpose(0, 1).reshape(-1, head_dim),
            value[0].transpose(0, 1).reshape(-1, head_dim),
        )
        scaling = options.get("scaling")
        scaling = head_dim**-0.5 if scaling is None else float(scaling)
        heads, tokens = query.shape[1], query.shape[2]
        # [kv heads, query heads of each, T, head_dim]
        folded = query[0].view(key.shape[1], -1, tokens, head_dim)
        out = query.new_empty(tokens, heads, head_dim)
        for group in self._plan.singles:
            out[group.begin : group.end] = self._singles(layer, group, folded, scaling)
        for group in self._plan.prefixed:
            self._fetch(layer, group)
            stop = group.mask.shape[1]
            _look(out, folded, group, group.fetched[0, 0, :, :stop], group.fetched[1, 0, :, :stop], scaling)
        for whole in self._plan.wholes:
            span = slice(whole.begin, whole.end)
            _look(out, folded, whole, key[0, :, span], value[0, :, span], scaling)
        return out[None]

    def _fetch(self, layer: int, group: Group) -> None:
        size = self._cache.layout.page_tokens * self._cache.layout.head_dim
        self._cache.read(layer, group.blocks, group.fetched.view(-1, size))

    def _singles(self, layer: int, group: Group, folded: torch.Tensor, scaling: float) -> torch.Tensor:
        """Rows of one token each, to [B, query heads, head_dim]: a product per row and kv head."""
        self._fetch(layer, group)
        keys, values = group.fetched
        query = folded[:, :, group.begin : group.end].permute(2, 0, 1, 3) * scaling
        scores = torch.matmul(query, keys.transpose(-1, -2)).add_(group.mask)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, values).flatten(1, 2)


def _look(
    out: torch.Tensor,
    folded: torch.Tensor,
    part: Group | Whole,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
) -> None:
    """One row's tokens look at `keys` and `values` [kv heads, S, head_dim], which all query heads share."""
    query = folded[:, :, part.begin : part.end]
    shape = (*query.shape[:2], *keys.shape[1:])
    mask = part.mask if isinstance(part, Group) else None
    seen = scaled_dot_product_attention(
        query,
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    out[part.begin : part.end] = seen.flatten(0, 1).transpose(0, 1)
