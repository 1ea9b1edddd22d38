"""Comparison of two computations of the same logits, to verify a faster one against a reference."""

from typing import Final

import torch

TOLERANCES: Final = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest `relative_difference` at which two computations count as equal, by the number format of the
weights."""


def relative_difference(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of `result - reference`, divided by the norm of `reference`.

    NaN if a number is not finite.
    """
    return float((result - reference).norm() / reference.norm())
