"""Computation of the transformers implementation in float32, as a reference for faster executions.

In bfloat16, rounding changes the results of an implementation as much as a small fault would. So it computes
in float32 over the exact values of its weights, some rows of a weight at a time. No weight is in memory in
float32 as a whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from baton.engine.quantization.quantized_weight import ROWS_A_TIME, QuantizedWeight


@contextmanager
def exactly(module: Any, codes: Mapping[nn.Linear, QuantizedWeight]) -> Iterator[None]:
    """Make the transformers implementation `module` compute in float32 within the context.

    All weights of `module` must be those of linear layers, or vectors. `codes`: quantized weights, for linear
    layers without plain weights.
    """
    table = module.get_input_embeddings()
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    try:
        for linear in linears:
            linear.forward = partial(_product, linear, codes.get(linear))  # type: ignore[method-assign]
        found = table.forward
        table.forward = lambda tokens: found(tokens).float()
        yield
    finally:
        for each in (table, *linears):
            vars(each).pop("forward", None)


def _product(linear: nn.Linear, codes: QuantizedWeight | None, rows: torch.Tensor) -> torch.Tensor:
    outs = torch.cat([nn.functional.linear(rows, part) for part in _parts(linear, codes)], dim=-1)
    return outs if linear.bias is None else outs + linear.bias.float()


def _parts(linear: nn.Linear, codes: QuantizedWeight | None) -> Iterator[torch.Tensor]:
    if codes is None:
        for part in torch.split(linear.weight, ROWS_A_TIME):
            yield part.float()
    else:
        for _, numbers in codes.in_parts():
            yield numbers
