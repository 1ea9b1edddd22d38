"""Interface of quantized weights as they are stored, and computation of the numbers that they stand for.

`weight_formats.py` has the formats. A weight is read and computed in strips of rows in float32, so that it
takes little memory in addition to the result. Products of small integers or FP8 numbers with scales in
float16 or bfloat16 are exact there. With scales in float32 each product is rounded once.
"""

from collections.abc import Sequence
from math import prod
from typing import Final, Protocol

import torch

STRIP: Final = 2**22
"""Most numbers of a weight that are dequantized at once. Rows that can only be dequantized together may have
more."""


class PartsMismatch(Exception):
    """The tensors that make a quantized weight do not fit together. The text describes the mismatch."""


class TensorSource(Protocol):
    """A tensor in a file, of which parts can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, start: int, stop: int) -> torch.Tensor: ...
    def columns(self, start: int, stop: int) -> torch.Tensor: ...
    def whole(self) -> torch.Tensor: ...
    def part(self, box: Sequence[range]) -> torch.Tensor: ...


class PackedWeight(Protocol):
    """A quantized weight as it is stored in files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized weight, as in the model."""

    @property
    def step(self) -> int:
        """Number of consecutive rows of the weight that can only be dequantized together."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the dequantized rows [start, stop) in float32. `start` is a multiple of `step`.

        Raises PartsMismatch.
        """

    def within(self, columns: range) -> "tuple[PackedWeight, int]":
        """Return a smaller weight that covers the input columns `columns` of this two-dimensional weight. It
        may have more columns.

        Also returns the index in the smaller weight of the first of `columns`. Raises PartsMismatch.
        """


class TensorSlice:
    """Some rows or columns of a two-dimensional tensor in a file, which are read when they are needed."""

    def __init__(self, stored: TensorSource, dim: int, places: range) -> None:
        self._stored = stored
        self._dim = dim
        self._places = places
        sides = list(stored.shape)
        sides[dim] = len(places)
        self.shape = tuple(sides)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.part((range(start, stop), range(self.shape[1])))

    def columns(self, start: int, stop: int) -> torch.Tensor:
        return self.part((range(self.shape[0]), range(start, stop)))

    def whole(self) -> torch.Tensor:
        return self.part(tuple(map(range, self.shape)))

    def part(self, box: Sequence[range]) -> torch.Tensor:
        inside = list(box)
        inside[self._dim] = self._places[box[self._dim].start : box[self._dim].stop]
        return self._stored.part(inside)


def numbers_of(weight: PackedWeight, dtype: torch.dtype, box: Sequence[range] | None = None) -> torch.Tensor:
    """Return the dequantized numbers of `weight`, or those at the indices in `box`, rounded to `dtype`.

    Raises PartsMismatch.
    """
    rows, *tail = map(range, weight.shape) if box is None else box
    if len(tail) == 1 and len(tail[0]) < weight.shape[1]:
        weight, begin = weight.within(tail[0])
        tail = [range(begin, begin + len(tail[0]))]
    out = torch.empty(*map(len, (rows, *tail)), dtype=dtype)
    each = max(1, STRIP // max(1, prod(weight.shape[1:]) * weight.step)) * weight.step
    for begin in range(rows.start // weight.step * weight.step, rows.stop, each):
        end = min(begin + each, weight.shape[0])
        first, last = max(begin, rows.start), min(end, rows.stop)
        strip = weight.rows(begin, end)[first - begin : last - begin]
        for dim, places in enumerate(tail, 1):
            strip = strip.narrow(dim, places.start, len(places))
        out[first - rows.start : last - rows.start] = strip
    return out
