"""Rotary embeddings on CPUs of queries that have a dimension of heads, as latent attention makes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


def rotate_by_head(model: torch.nn.Module) -> None:
    """Let vLLM's `model` on a CPU rotate queries that have a dimension of heads by torch.

    The kernel of vLLM 0.32 takes their heads for tokens: it rotates by positions of other tokens, also of
    other requests, and leaves the last tokens as they are.
    """
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.forward = partial(_rotate, module.forward, module.forward_native)


def _rotate(
    kernel: Callable[..., Any],
    by_torch: Callable[..., Any],
    positions: torch.Tensor,
    query: torch.Tensor,
    *rest: Any,
) -> Any:
    """Return the rotated query and key. `kernel`: for a query without a dimension of heads. `rest`: the key,
    if there is one, and what else the rotation takes."""
    rotate = by_torch if query.dim() > positions.dim() + 1 else kernel
    return rotate(positions, query, *rest)
