"""How is a product with a weight computed fastest on this device?

On a CPU oneDNN computes it over a layout of its own, made once. The two operators for that are private to
torch: they are named in this file alone, and where they are missing the weight stays as it is.
"""

from typing import Any, Final, Protocol

import torch
from torch import nn

BATCH: Final = 512
"""The number of rows that oneDNN's layout is made for. Measured: it serves a single row as well as one made
for that, so one copy of the weights does for prefill and decode."""


class Linear(Protocol):
    """`rows` [T, in], contiguous or not, to a new [T, out] tensor."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class Plain:
    """As the model library does it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self._weight, self._bias)


class PackedLinear:
    """Over oneDNN's own layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH)
        self._bias = bias
        self._run: Any = torch.ops.mkldnn._linear_pointwise.default
        self._nothing: list[Any] = []

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._run(rows, self._weight, self._bias, "none", self._nothing, "")
        return out


def fused_linear(parts: list[nn.Linear]) -> Linear:
    """One product in place of several of the same rows: what comes out stands side by side. Several weights
    are copied, and one that is laid out anew is: let go of `parts` afterwards."""
    weight, bias = joined(parts)
    return PackedLinear(weight, bias) if _packs(weight) else Plain(weight, bias)


def joined(parts: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Their weights, side by side, and their biases, if there are any. A single weight is not copied."""
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
