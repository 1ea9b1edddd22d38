"""Attention over pages of latents, for models with multi-head latent attention (MLA).

A page holds one vector for each token and layer, which all heads share: the compressed keys and values after
their norm, then the rotated part of the key. The transformers implementations expand it by one projection,
`kv_b_proj`. A row of several tokens attends to expanded keys and values, as there. For a row of one token
that would compute far more than its attention, so the projection is absorbed: it is applied to the token's
query and to the result, and attention is over the latents themselves.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from baton.engine.execution.attention_span import AttentionSpan, attention_options
from baton.engine.execution.paged_attention import PagedAttention, attend_row
from baton.engine.execution.step_plan import AttentionMetadata
from baton.engine.kv_cache import PagedKvCache
from baton.pages.layout import LATENT

EXPAND: Final = "expand_kv"
"""Method by which attention modules of the transformers library expand latents to keys and values."""


def defer_expansion(module: torch.nn.Module) -> None:
    """Make all attention modules in `module` pass latents to our attention in place of keys and values."""
    for each in module.modules():
        if callable(getattr(type(each), EXPAND, None)):
            setattr(each, EXPAND, _unexpanded)


def restore_expansion(module: torch.nn.Module) -> None:
    """Undo `defer_expansion`."""
    for each in module.modules():
        vars(each).pop(EXPAND, None)


def defers_expansion(module: torch.nn.Module) -> bool:
    """Return whether the attention module passes latents to our attention: compressed ones as keys, rotated
    keys as values."""
    return vars(module).get(EXPAND) is _unexpanded


def _unexpanded(compressed: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return compressed, rotated


def expanded(module: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [heads, S, head_dim] and values [heads, S, v_head_dim] of `latents` [S, elements].

    The transformers implementation's own attention `module` expands them.
    """
    rank = module.kv_lora_rank
    compressed, rotated = torch.split(latents[None, None], [rank, latents.shape[1] - rank], dim=3)
    keys, values = getattr(type(module), EXPAND)(module, compressed, rotated)
    return keys[0], values[0]


def absorbed(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Return queries whose scores with latents are those of `query` [T, heads, head_dim] with expanded keys.

    Their shape is [T, heads, elements of a latent].
    """
    plain = module.qk_nope_head_dim
    compressed = torch.bmm(query[..., :plain].transpose(0, 1), _projection(module)[:, :plain])
    return torch.cat((compressed.transpose(0, 1), query[..., plain:]), dim=2)


def projected(module: Any, attended: torch.Tensor) -> torch.Tensor:
    """Return the results [T, heads, v_head_dim] of attention whose results over latents are `attended`.

    `attended`: [T, heads, elements of a latent].
    """
    values = _projection(module)[:, module.qk_nope_head_dim :]
    return torch.bmm(attended[..., : values.shape[2]].transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


def _projection(module: Any) -> torch.Tensor:
    """Return the weight that expands latents: [heads, elements of key and value, compressed elements]."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])


class LatentAttention(PagedAttention):
    """Attention of one step over pages of latents."""

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store the step's latents of a layer, and return the attention results [1, T, heads, v_head_dim].

        `module`: an attention module that defers expansion. `key`: its compressed latents. `value`: its
        rotated keys.
        """
        layer: int = module.layer_idx
        attention = self._with_span(layer, attention_options(query, options))
        latents = torch.cat((key[0, 0], value[0, 0]), dim=1)
        self._cache.write(layer, self._plan.write, latents)
        heads = query[0].transpose(0, 1)
        out = query.new_empty(*heads.shape[:2], module.v_head_dim)
        for group in self._plan.groups:
            part = slice(group.begin, group.end)
            attended = self._attend_group(layer, group, absorbed(module, heads[part]), attention)
            out[part] = projected(module, attended)
        for row in self._plan.continued:
            self._cache.read(layer, row.pages, row.buffer)
            attend_row(out, query[0][:, None], row, *expanded(module, row.keys[0]), attention)
        for first in self._plan.firsts:
            own = latents[first.begin : first.end]
            attend_row(out, query[0][:, None], first, *expanded(module, own), attention)
        return out[None]


def attention_over(
    plan: AttentionMetadata, cache: PagedKvCache, spans: Mapping[int, AttentionSpan]
) -> PagedAttention:
    """Return the attention of one step over the pages of `cache`, which hold latents or keys and values.

    `spans`: attention spans by layer id. Layers not in it attend to all earlier tokens.
    """
    over_latents = cache.group.planes[0].name == LATENT
    return (LatentAttention if over_latents else PagedAttention)(plan, cache, spans)
