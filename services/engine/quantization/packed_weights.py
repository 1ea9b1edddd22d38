"""Which numbers do the weights of a quantised checkpoint stand for?

Each class is one way of storing a weight, as its format defines it. A weight is read and computed in strips
of rows, in float32, so that little is held beside the result. Products of small integers or FP8 numbers with
scales in float16 or bfloat16 are exact there; with scales in float32 each is rounded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Protocol

import torch

WORD: Final = 32
"""Bits that packed integers share."""
STRIP: Final = 2**22
"""Numbers that are computed at a time, unless the rows that go together have more."""
FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen codes of 4 bits (E2M1) stand for."""
EXPONENT_BIAS: Final = 127
"""Of a scale that is an exponent alone (E8M0)."""
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ's each of eight neighbouring columns lies."""


class PartsMismatch(Exception):
    """Parts of a weight do not go together. The text says how."""


class TensorSource(Protocol):
    """A tensor of a file, of which parts can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, start: int, stop: int) -> torch.Tensor: ...
    def columns(self, start: int, stop: int) -> torch.Tensor: ...
    def whole(self) -> torch.Tensor: ...
    def part(self, box: Sequence[range]) -> torch.Tensor: ...


class PackedWeight(Protocol):
    """A weight as it is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its numbers, as the model has them."""

    @property
    def step(self) -> int:
        """Rows that have to be computed together."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Those from `start`, a multiple of `step`, in float32. Raises PartsMismatch."""

    def within(self, columns: range) -> "tuple[PackedWeight, int]":
        """Of a weight of two dimensions, less of it that has those `columns`, and where in it they begin.
        Raises PartsMismatch."""


class TensorSlice:
    """A part of a tensor of a file, which has two dimensions, along one of them."""

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
    """The numbers of `weight`, or of some places along each of its dimensions, rounded to `dtype`. Raises
    PartsMismatch."""
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


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """FP8 numbers or integers of 8 bits, [.., out, in], each times the scale of its block: of the tensor, of
    a row, of a group of a row, or of a rectangle. Integers may have zero points in the scales' shape."""

    numbers: TensorSource
    scale: TensorSource
    block: tuple[int, int] | None = None
    """Of rectangles: rows and columns. The last ones may be cut short."""
    zero: TensorSource | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def step(self) -> int:
        return self._blocks()[0] if len(self.shape) == 2 else 1

    def rows(self, start: int, stop: int) -> torch.Tensor:
        numbers = self.numbers.rows(start, stop).float()
        if self.zero is not None:
            numbers -= self._spread(self.zero, start, stop)
        return numbers.mul_(self._spread(self.scale, start, stop))

    def within(self, columns: range) -> tuple[PackedWeight, int]:
        wide = self._blocks()[1]
        if self.scale.shape[-1:] == (1,) or len(self.scale.shape) < 2:
            return replace(self, numbers=TensorSlice(self.numbers, 1, columns)), 0
        blocks = _covering(columns, wide)
        numbers = range(self.shape[1])[blocks.start * wide : blocks.stop * wide]
        some = replace(
            self,
            numbers=TensorSlice(self.numbers, 1, numbers),
            scale=TensorSlice(self.scale, 1, blocks),
            zero=None if self.zero is None else TensorSlice(self.zero, 1, blocks),
        )
        return some, columns.start - numbers.start

    def _spread(self, scale: TensorSource, start: int, stop: int) -> torch.Tensor:
        """One for each number of the rows, or what becomes that by broadcasting."""
        if prod(scale.shape) == 1:
            return _plain(scale.whole()).reshape(())
        high, wide = self._blocks()
        if len(self.shape) > 2:
            values = _plain(scale.rows(start, stop)).repeat_interleave(high, -2)[..., : self.shape[-2], :]
        else:
            values = _plain(scale.rows(start // high, -(-stop // high)))
            if values.ndim == 1:
                values = values[:, None]
            values = values.repeat_interleave(high, 0)[: stop - start]
        if values.shape[-1] == 1:
            return values
        return values.repeat_interleave(wide, -1)[..., : self.shape[-1]]

    def _blocks(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        shape, told = self.shape, self.scale.shape
        if prod(told) == 1:
            return 1, shape[-1]
        if len(shape) == 2 and told == shape[:1]:
            told = (*told, 1)
        if len(told) == len(shape) and told[:-2] == shape[:-2]:
            block = self.block or (0, 0)
            sides = [_side(*each) for each in zip(shape[-2:], told[-2:], block, strict=True)]
            if all(sides):
                return sides[0], sides[1]
        raise PartsMismatch(f"scales of the shape {list(self.scale.shape)} for {list(shape)} numbers")


def _covering(columns: range, wide: int) -> range:
    """The blocks, each so `wide`, in which those are."""
    return range(columns.start // wide, -(-columns.stop // wide))


def _side(size: int, scales: int, block: int) -> int:
    """Of `size` numbers how many share one of `scales`; 0 where that cannot be."""
    if block:
        return block if -(-size // block) == scales else 0
    return size // scales if scales and size % scales == 0 else 0


@dataclass(frozen=True, slots=True)
class Words:
    """Of compressed-tensors: integers of `bits`, [out, in], side by side along a row in words of 32 bits,
    each with the middle of its range added; times the scale of its group of columns."""

    words: TensorSource
    scale: TensorSource
    bits: int
    columns: int
    zero: TensorSource | None = None
    """[out, groups], packed along the columns; none: the middle of the range."""
    group_of: TensorSource | None = None
    """Of each column, where groups are not neighbours."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape[0], self.columns

    @property
    def step(self) -> int:
        return WORD // self.bits

    def rows(self, start: int, stop: int) -> torch.Tensor:
        middle = 1 << self.bits - 1
        if self.words.shape[1] != -(-self.columns // self.step):
            raise PartsMismatch(
                f"{self.words.shape[1]} words a row for {self.columns} integers of {self.bits} bits"
            )
        numbers = (_integers(self.words.rows(start, stop), self.bits)[:, : self.columns] - middle).float()
        groups = _groups(self.scale.shape[1], self.columns, self.group_of)
        if self.zero is not None:
            each = self.step
            zeros = _integers(self.zero.rows(start // each, -(-stop // each)).T, self.bits).T[: stop - start]
            numbers -= (zeros - middle).float()[:, groups]
        return numbers.mul_(self.scale.rows(start, stop).float()[:, groups])

    def within(self, columns: range) -> tuple[PackedWeight, int]:
        told = self.scale.shape[1]
        wide = self.columns // told if told and self.columns % told == 0 else 0
        if self.group_of is not None or not wide or wide % self.step:
            return self, columns.start
        groups = _covering(columns, wide)
        words = range(groups.start * wide // self.step, groups.stop * wide // self.step)
        some = replace(
            self,
            words=TensorSlice(self.words, 1, words),
            scale=TensorSlice(self.scale, 1, groups),
            columns=len(groups) * wide,
            zero=None if self.zero is None else TensorSlice(self.zero, 1, groups),
        )
        return some, columns.start - groups.start * wide


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """Of GPTQ: integers, [in, out], in words along a column; less the zero point of their group of inputs,
    and times its scale."""

    words: TensorSource
    zeros: TensorSource
    """[groups, out], in words along a row."""
    scales: TensorSource
    bits: int
    added: int
    """To every zero point that is stored: 1 in the format's first version."""
    group_of: TensorSource | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape[1], self.words.shape[0] * WORD // self.bits

    @property
    def step(self) -> int:
        return WORD // self.bits

    def rows(self, start: int, stop: int) -> torch.Tensor:
        each, inputs = self.step, self.shape[1]
        numbers = _integers(self.words.columns(start, stop).T, self.bits)
        zeros = _integers(self.zeros.columns(start // each, -(-stop // each)), self.bits)[:, : stop - start]
        groups = _groups(self.scales.shape[0], inputs, self.group_of)
        numbers = numbers - (zeros + self.added).T[:, groups]
        return numbers.float().mul_(self.scales.columns(start, stop).float().T[:, groups])

    def within(self, columns: range) -> tuple[PackedWeight, int]:
        groups, inputs = self.scales.shape[0], self.shape[1]
        wide = inputs // groups if groups and inputs % groups == 0 else 0
        if not wide or wide % self.step:
            return self, columns.start
        if not torch.equal(_groups(groups, inputs, self.group_of), torch.arange(inputs) // wide):
            return self, columns.start
        some = _covering(columns, wide)
        words = range(some.start * wide // self.step, some.stop * wide // self.step)
        part = replace(
            self,
            words=TensorSlice(self.words, 0, words),
            zeros=TensorSlice(self.zeros, 0, some),
            scales=TensorSlice(self.scales, 0, some),
            group_of=None,
        )
        return part, columns.start - some.start * wide


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """Of AWQ's first version (gemm): integers of 4 bits, [in, out], in words along a row and in an order of
    their own; less the zero point of their group of inputs, and times its scale."""

    words: TensorSource
    zeros: TensorSource
    scales: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape[1] * len(AWQ_ORDER), self.words.shape[0]

    @property
    def step(self) -> int:
        return len(AWQ_ORDER)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        first, last = start // self.step, -(-stop // self.step)
        numbers, zeros = (self._ordered(each.columns(first, last)) for each in (self.words, self.zeros))
        groups = _groups(self.scales.shape[0], self.shape[1], None)
        numbers = numbers - zeros[groups]
        return numbers.float().mul_(self.scales.columns(start, stop).float()[groups]).T

    def within(self, columns: range) -> tuple[PackedWeight, int]:
        groups, inputs = self.scales.shape[0], self.shape[1]
        wide = inputs // groups if groups and inputs % groups == 0 else 0
        if not wide:
            return self, columns.start
        some = _covering(columns, wide)
        part = AwqWeight(
            TensorSlice(self.words, 0, range(some.start * wide, some.stop * wide)),
            TensorSlice(self.zeros, 0, some),
            TensorSlice(self.scales, 0, some),
        )
        return part, columns.start - some.start * wide

    def _ordered(self, words: torch.Tensor) -> torch.Tensor:
        codes = _integers(words, WORD // self.step)
        return codes.reshape(len(codes), -1, self.step)[..., list(AWQ_ORDER)].flatten(-2)


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """Codes of 4 bits (E2M1), [out, in], two in a byte, the first one low; times the scale of their group of
    columns, and by that of the whole tensor."""

    codes: TensorSource
    scale: TensorSource
    whole: TensorSource | None = None
    divides: bool = False
    """By the whole tensor's scale, as compressed-tensors keeps it; ModelOpt's multiplies."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def step(self) -> int:
        return 1

    def rows(self, start: int, stop: int) -> torch.Tensor:
        scale = _plain(self.scale.rows(start, stop))
        if self.whole is not None:
            factor = self.whole.whole().float().reshape(())
            scale = scale / factor if self.divides else scale * factor
        groups = _groups(scale.shape[1], self.shape[1], None)
        return _fp4(self.codes.rows(start, stop)).mul_(scale[:, groups])

    def within(self, columns: range) -> tuple[PackedWeight, int]:
        told = self.scale.shape[1]
        wide = self.shape[1] // told if told and self.shape[1] % told == 0 else 0
        if not wide or wide % 2:
            return self, columns.start
        groups = _covering(columns, wide)
        codes = range(groups.start * wide // 2, groups.stop * wide // 2)
        some = replace(
            self, codes=TensorSlice(self.codes, 1, codes), scale=TensorSlice(self.scale, 1, groups)
        )
        return some, columns.start - groups.start * wide


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """Of gpt-oss (MXFP4): codes as of Fp4Weight, [expert, out, group, 16 bytes], and an exponent for each
    group. The model has them turned, [expert, in, out]."""

    blocks: TensorSource
    scales: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, size = self.blocks.shape
        return experts, groups * size * 2, outputs

    @property
    def step(self) -> int:
        return 1

    def rows(self, start: int, stop: int) -> torch.Tensor:
        numbers = _fp4(self.blocks.rows(start, stop)).mul_(_plain(self.scales.rows(start, stop))[..., None])
        return numbers.flatten(-2).transpose(1, 2)

    def within(self, columns: range) -> tuple[PackedWeight, int]:
        return self, columns.start


def _fp4(codes: torch.Tensor) -> torch.Tensor:
    """Of bytes, twice as many numbers in the last dimension."""
    codes = codes.view(torch.uint8)
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return torch.tensor(FP4)[both.int()]


def _plain(scale: torch.Tensor) -> torch.Tensor:
    """Scales as numbers of float32. A byte is an exponent."""
    if scale.dtype is torch.uint8:
        return torch.exp2(scale.float() - EXPONENT_BIAS)
    return scale.float()


def _integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Of words, the integers in them, the lowest first, in the last dimension."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def _groups(groups: int, size: int, told: TensorSource | None) -> torch.Tensor:
    """Of each of `size` numbers, which of the groups it is in. Raises PartsMismatch."""
    if told is not None:
        found = told.whole().long()
        if len(found) == size and bool((found >= 0).all()) and bool((found < groups).all()):
            return found
        if not bool((found == -1).all()):  # none was told after all
            raise PartsMismatch(f"{len(found)} columns in groups, of {size}, and {groups} groups")
    if not groups or size % groups:
        raise PartsMismatch(f"{groups} groups of {size} numbers")
    return torch.arange(size) // (size // groups)
