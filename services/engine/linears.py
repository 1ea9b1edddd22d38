"""How is a product with a weight computed fastest on this device?

On a CPU oneDNN computes it over a layout of its own, made once. The two operators for that are private to
torch: they are named in this file alone, and where they are missing the weight stays as it is. A step of a
few rows does little but read the weights, and there FBGEMM reads its layout nearly twice as fast: where they
may be held twice, both are.
"""

from typing import Any, Final, Protocol

import torch
from torch import nn

BATCH: Final = 512
"""The number of rows that the layout is made for. Measured: it serves a single row as well as one made for
that, so one copy of the weights does for prefill and decode."""
FEW: Final = 3
"""Rows, up to which FBGEMM is faster than oneDNN in bfloat16. Measured."""


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


class Packed:
    """Over oneDNN's own layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH)
        self._bias = bias
        self._run: Any = torch.ops.mkldnn._linear_pointwise.default
        self._nothing: list[Any] = []

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._run(rows, self._weight, self._bias, "none", self._nothing, "")
        return out


class ByPrecision:
    """Rows of the weight's own precision by `many`; those of float32, of which there are few, over FBGEMM's
    layout of the weight in half precision."""

    def __init__(self, many: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._many = many
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            weight.float(), None if bias is None else bias.float()
        )
        self._run: Any = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype is not torch.float32:
            return self._many(rows)
        out: torch.Tensor = self._run(rows, self._packed)
        return out


def linear_of(parts: list[nn.Linear], *, twice: bool = False) -> Linear:
    """One product in place of several of the same rows: what comes out stands side by side. Several weights
    are copied, and one that is packed is: let go of `parts` afterwards. `twice`: takes rows of float32 as
    well (see `may_hold_twice`)."""
    weight = torch.cat([part.weight for part in parts]) if len(parts) > 1 else parts[0].weight.data
    biases = [
        part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.data for part in parts
    ]
    biased = any(part.bias is not None for part in parts)
    bias = torch.cat(biases) if biased else None
    linear = Packed(weight, bias) if _packs(weight) else Plain(weight, bias)
    return ByPrecision(linear, weight, bias) if twice else linear


def may_hold_twice(weight: torch.Tensor) -> bool:
    """Whether this weight can be held in half precision too, for steps of up to `FEW` rows. Half precision
    has more digits than bfloat16; what is too small for it changes by less than its smallest number."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return False
    try:
        named = torch.ops.quantized.linear_prepack_fp16, torch.ops.quantized.linear_dynamic_fp16.default
    except AttributeError:
        return False
    fast = "fbgemm" in torch.backends.quantized.supported_engines
    return all(named) and fast and bool(weight.abs().max() <= torch.finfo(torch.float16).max)


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
