"""Storage formats of quantized weights in released checkpoints, one class for each."""

from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch

from baton.engine.quantization.packed_weights import PackedWeight, PartsMismatch, TensorSlice, TensorSource

WORD: Final = 32
"""Bits of the words into which small integers are packed."""
FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Number for each code of FP4 (E2M1), by the code from 0 to 15."""
EXPONENT_BIAS: Final = 127
"""Bias of a scale that is stored as an exponent alone (E8M0)."""
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a 32-bit word of AWQ at which each of eight neighbouring columns is stored."""


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """Weight of FP8 numbers or integers of 8 bits, [.., out, in], each multiplied by the scale of its block.

    A block is the tensor, a row, a group of a row, or a rectangle. Integers may have zero points in the shape
    of the scales.
    """

    numbers: TensorSource
    scale: TensorSource
    block: tuple[int, int] | None = None
    """Size (rows, columns) of the blocks that share a scale, if they are rectangles, else None. The last
    blocks may be smaller."""
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
        """Return the scale of each number in the rows [start, stop), in a shape that broadcasts to these
        rows."""
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
        """Return the size (rows, columns) of the blocks whose numbers share a scale. Raises PartsMismatch."""
        shape, shape_of_scales = self.shape, self.scale.shape
        if prod(shape_of_scales) == 1:
            return 1, shape[-1]
        if len(shape) == 2 and shape_of_scales == shape[:1]:
            shape_of_scales = (*shape_of_scales, 1)
        if len(shape_of_scales) == len(shape) and shape_of_scales[:-2] == shape[:-2]:
            block = self.block or (0, 0)
            sides = [_side(*each) for each in zip(shape[-2:], shape_of_scales[-2:], block, strict=True)]
            if all(sides):
                return sides[0], sides[1]
        raise PartsMismatch(f"scales of the shape {list(self.scale.shape)} for {list(shape)} numbers")


def _covering(columns: range, wide: int) -> range:
    """Return the range of blocks, each `wide` columns, that covers `columns`."""
    return range(columns.start // wide, -(-columns.stop // wide))


def _covering_groups(
    columns: range, size: int, groups: int, step: int = 1
) -> tuple[range, range, int] | None:
    """Return the groups that cover `columns`, the words that contain them, and the index of the first of
    `columns` among the covered columns.

    `size`: number of all columns. `groups`: number of groups. `step`: numbers in a word. Returns None if a
    group does not fill whole words.
    """
    wide = size // groups if groups and size % groups == 0 else 0
    if not wide or wide % step:
        return None
    some = _covering(columns, wide)
    first, last = some.start * wide, some.stop * wide
    return some, range(first // step, last // step), columns.start - first


def _side(size: int, scales: int, block: int) -> int:
    """Return how many neighbouring numbers along one dimension share a scale, or 0 if the counts do not fit.

    `size`, `scales`: numbers and scales in the dimension. `block`: the result if the file states it, or 0.
    """
    if block:
        return block if -(-size // block) == scales else 0
    return size // scales if scales and size % scales == 0 else 0


@dataclass(frozen=True, slots=True)
class CompressedTensorsWeight:
    """Weight of integers in compressed-tensors' format, [out, in], packed along a row in words of 32 bits.

    Integers are stored with the middle of their range added. They are multiplied by the scale of their group
    of columns.
    """

    words: TensorSource
    scale: TensorSource
    bits: int
    columns: int
    zero: TensorSource | None = None
    """Zero points [out, groups], packed along the columns. None if every zero point is the middle of the
    codes' range."""
    group_of: TensorSource | None = None
    """Group index of each input column, as a tensor in the file. None if the columns of a group are
    neighbours."""

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
        found = _covering_groups(columns, self.columns, self.scale.shape[1], self.step)
        if self.group_of is not None or found is None:
            return self, columns.start
        groups, words, place = found
        part = replace(
            self,
            words=TensorSlice(self.words, 1, words),
            scale=TensorSlice(self.scale, 1, groups),
            columns=len(words) * self.step,
            zero=None if self.zero is None else TensorSlice(self.zero, 1, groups),
        )
        return part, place


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """Weight of integers in GPTQ's format, [in, out], packed along a column in words of 32 bits.

    The zero point of their group of inputs is subtracted, and they are multiplied by its scale.
    """

    words: TensorSource
    zeros: TensorSource
    """Zero points [groups, out], small integers packed along a row into words."""
    scales: TensorSource
    bits: int
    added: int
    """Number to add to every stored zero point: 1 in the first version of GPTQ's format, else 0."""
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
        count, inputs = self.scales.shape[0], self.shape[1]
        found = _covering_groups(columns, inputs, count, self.step)
        if found is None:
            return self, columns.start
        if not torch.equal(_groups(count, inputs, self.group_of), _groups(count, inputs, None)):
            return self, columns.start
        groups, words, place = found
        part = replace(
            self,
            words=TensorSlice(self.words, 0, words),
            zeros=TensorSlice(self.zeros, 0, groups),
            scales=TensorSlice(self.scales, 0, groups),
            group_of=None,
        )
        return part, place


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """Weight of 4-bit integers in AWQ's first format (gemm), [in, out], packed along a row in AWQ_ORDER.

    The zero point of their group of inputs is subtracted, and they are multiplied by its scale.
    """

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
        found = _covering_groups(columns, self.shape[1], self.scales.shape[0])
        if found is None:
            return self, columns.start
        groups, words, place = found
        part = AwqWeight(
            TensorSlice(self.words, 0, words),
            TensorSlice(self.zeros, 0, groups),
            TensorSlice(self.scales, 0, groups),
        )
        return part, place

    def _ordered(self, words: torch.Tensor) -> torch.Tensor:
        codes = _integers(words, WORD // self.step)
        return codes.reshape(len(codes), -1, self.step)[..., list(AWQ_ORDER)].flatten(-2)


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """Weight of 4-bit codes (E2M1), [out, in], two in a byte with the first one in the lower half.

    They are multiplied by the scale of their group of columns, and multiplied or divided by that of the
    tensor.
    """

    codes: TensorSource
    scale: TensorSource
    whole: TensorSource | None = None
    divides: bool = False
    """Whether the numbers are divided by the scale of the whole tensor, as in compressed-tensors. In
    ModelOpt's format they are multiplied by it."""

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
        found = _covering_groups(columns, self.shape[1], self.scale.shape[1], 2)
        if found is None:
            return self, columns.start
        groups, codes, place = found
        part = replace(
            self, codes=TensorSlice(self.codes, 1, codes), scale=TensorSlice(self.scale, 1, groups)
        )
        return part, place


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """Weights of gpt-oss's experts (MXFP4): codes [expert, out, group, 16 bytes], and an exponent for each
    group.

    Codes are as in Fp4Weight. The model has the transposed weights, [expert, in, out].
    """

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
    """Unpack bytes of two 4-bit codes each (E2M1), and return the numbers that they stand for. The last
    dimension doubles."""
    codes = codes.view(torch.uint8)
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return torch.tensor(FP4)[both.int()]


def _plain(scale: torch.Tensor) -> torch.Tensor:
    """Return `scale` in float32. A scale that is stored as a byte is an exponent of 2 (E8M0)."""
    if scale.dtype is torch.uint8:
        return torch.exp2(scale.float() - EXPONENT_BIAS)
    return scale.float()


def _integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack `words`: return their integers of `bits` bits, the lowest bits of a word first, side by side in
    the last dimension."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def _groups(groups: int, size: int, group_of: TensorSource | None) -> torch.Tensor:
    """Return the index of the group to which each of `size` neighbouring numbers belongs. Raises
    PartsMismatch.

    `groups`: number of groups. `group_of`: group indices from the file, or None if the numbers of a group are
    neighbours.
    """
    if group_of is not None:
        found = group_of.whole().long()
        if len(found) == size and bool((found >= 0).all()) and bool((found < groups).all()):
            return found
        if not bool((found == -1).all()):  # -1 everywhere: no groups are given
            raise PartsMismatch(f"{len(found)} columns in groups, of {size}, and {groups} groups")
    if not groups or size % groups:
        raise PartsMismatch(f"{groups} groups of {size} numbers")
    return torch.arange(size) // (size // groups)
