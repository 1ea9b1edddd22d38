"""Linear layers in the fastest form for a device.

On a CPU oneDNN computes a product over a weight in a layout of its own, made once. The two operators for that
are private to torch, and named in this file alone. If they are missing, weights stay as they are.
"""

from typing import Any, Final, Protocol

import torch
from torch import nn

BATCH: Final = 512
"""Number of input rows for which oneDNN's layout of a weight is made.

It was measured to serve a single row as well as a layout for one row. So one copy of the weights serves
prefill and decode.
"""


class Linear(Protocol):
    """Function that multiplies `rows` [T, in], contiguous or not, by a weight. Returns a new tensor [T,
    out]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class PlainLinear:
    """A linear layer as torch computes it by default."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self._weight, self._bias)


class PackedLinear:
    """A linear layer whose weight is in oneDNN's own layout, for CPUs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH)
        self._bias = bias
        self._run: Any = torch.ops.mkldnn._linear_pointwise.default
        self._nothing: list[Any] = []

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._run(rows, self._weight, self._bias, "none", self._nothing, "")
        return out


def fused_linear(parts: list[nn.Linear]) -> Linear:
    """Return one layer that computes several linear layers of the same input, with their results side by
    side.

    Joined and repacked weights are copies: drop `parts` afterwards.
    """
    weight, bias = join_weights(parts)
    return PackedLinear(weight, bias) if _packs(weight) else PlainLinear(weight, bias)


def join_weights(parts: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the joined weights of `parts`, and their joined biases or None. A single weight is not
    copied."""
    weight = torch.cat([part.weight for part in parts]) if len(parts) > 1 else parts[0].weight.data
    biases = [
        part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.data for part in parts
    ]
    biased = any(part.bias is not None for part in parts)
    return weight, torch.cat(biases) if biased else None


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    try:
        named = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise.default
        if weight.dtype is torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except AttributeError:
        return False
    return weight.dtype is torch.float32 and all(named)
