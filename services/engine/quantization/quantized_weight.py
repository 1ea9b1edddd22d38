"""Quantized weights in memory: codes, with a scale and maybe a least number for each group of a row.

A number is code * scale + least. The compiled step multiplies codes as they are, and scales the sums of a
group (`step.c`). The result is the product with those numbers. `gguf_blocks.py` takes codes from a file. This
module makes them from plain weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

GROUP: Final = 32
"""Consecutive numbers of a row that share a scale, in weights quantized by this module."""
GROUPS: Final = (16, 32)
"""Numbers of consecutive elements of a row that may share a scale, so that the compiled step supports it."""
LARGEST: Final = {8: 127, 4: 15}
"""Largest value of a quantized code, by the bits of a code. Codes of 8 bits are signed, those of 4 bits are
not."""
MIDDLE: Final = 8
"""The 4-bit code that stands for 0 in a weight that stores no least number for its groups."""
ROWS_A_TIME: Final = 1024
"""Rows of a weight that are quantized or dequantized at once, which bounds the memory for intermediate
results."""


class NotQuantizable(Exception):
    """A weight cannot be represented by quantized codes. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Quantized codes of a weight [outs, depth], with the scale and the least number of each group."""

    codes: torch.Tensor
    """Codes [outs, depth]: int8, or uint8 with values of 4 bits."""
    scale: torch.Tensor
    """Scale of each group of a row, [outs, groups], in float16 or float32."""
    least: torch.Tensor | None = None
    """Number for which code 0 stands in each group, [outs, groups], in the dtype of the scales.

    None if it needs no storage: 0 with codes of 8 bits, -8 times the scale with codes of 4 bits.
    """
    group: int = GROUP

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype is torch.int8 else 4

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight in the layout of the compiled step."""
        scales = self.scale.nbytes * (1 if self.least is None else 2)
        return scales + self.codes.numel() * self.bits // 8

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def rows(self, which: slice | torch.Tensor) -> "QuantizedWeight":
        least = None if self.least is None else self.least[which]
        return QuantizedWeight(self.codes[which], self.scale[which], least, self.group)

    def numbers(self) -> torch.Tensor:
        """Return the numbers for which the codes stand, [outs, depth], in float32."""
        codes = self.codes.float()
        if self.least is None and self.bits == 4:
            codes -= MIDDLE
        numbers = codes.mul_(self._spread(self.scale))
        return numbers if self.least is None else numbers.add_(self._spread(self.least))

    def in_parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the dequantized weight some rows at a time: a slice of rows, and their numbers in float32."""
        for start in range(0, len(self.codes), ROWS_A_TIME):
            which = slice(start, start + ROWS_A_TIME)
            yield which, self.rows(which).numbers()

    def _spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        spread = of_groups.float().repeat_interleave(self.group, dim=1)
        return spread[:, : self.codes.shape[1]]


def quantize_weight(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Quantize `weight` [outs, depth] to codes of 8 or 4 bits. Raises NotQuantizable.

    With 8 bits the scale fits a group's largest absolute number. With 4 bits codes count from the least
    number, and the largest number has the last code.
    """
    parts = [_coded(part.float(), bits) for part in torch.split(weight, ROWS_A_TIME)]
    return join_quantized(parts)


def _coded(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    outs, depth = weight.shape
    if not bool(torch.isfinite(weight).all()):
        raise NotQuantizable("it holds what is not a number")
    filled = (
        torch.nn.functional.pad(weight, (0, -depth % GROUP), mode="replicate") if depth % GROUP else weight
    )
    groups = filled.view(outs, -1, GROUP)
    largest = LARGEST[bits]
    if bits == 8:
        least, span = None, groups.abs().amax(-1)
    else:
        least = _half(groups.amin(-1), up=False)
        span = (groups.amax(-1) - least.float()).clamp_(min=0)
    scale = _half(span / largest, up=True)
    shown = groups if least is None else groups - least.float()[..., None]
    divisor = torch.where(scale == 0, 1, scale.float())
    codes = (shown / divisor[..., None]).round_().clamp_(-largest if bits == 8 else 0, largest)
    codes = codes.view(outs, -1)[:, :depth].to(torch.int8 if bits == 8 else torch.uint8)
    return QuantizedWeight(codes.contiguous(), scale, least)


def _half(numbers: torch.Tensor, *, up: bool) -> torch.Tensor:
    """Round numbers to float16, away from the nearest one if needed: upwards if `up`, else downwards. Raises
    NotQuantizable."""
    half = numbers.half()
    if not bool(torch.isfinite(half).all()):
        raise NotQuantizable("its numbers are too large for scales in float16")
    wrong = half.float() < numbers if up else half.float() > numbers
    limit = torch.tensor(float("inf") if up else float("-inf"), dtype=torch.float16)
    return torch.where(wrong, torch.nextafter(half, limit), half)


def join_quantized(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return several quantized weights of the same depth as one, in a form that represents all of them
    exactly."""
    if len(parts) == 1:
        return parts[0]
    group = min(each.group for each in parts)
    bits = max(each.bits for each in parts)
    wide = torch.float32 if any(each.scale.dtype is torch.float32 for each in parts) else torch.float16
    has_least = any(each.least is not None for each in parts) or len({each.bits for each in parts}) > 1
    alike = [_as(each, group, bits, wide, has_least=has_least) for each in parts]
    leasts = [each.least for each in alike if each.least is not None]
    return QuantizedWeight(
        torch.cat([each.codes for each in alike]),
        torch.cat([each.scale for each in alike]),
        torch.cat(leasts) if leasts else None,
        group,
    )


def _as(
    codes: QuantizedWeight, group: int, bits: int, of_scales: torch.dtype, *, has_least: bool
) -> QuantizedWeight:
    if has_least and codes.least is None:
        middle = MIDDLE if codes.bits == 4 else 0
        codes = replace(codes, least=-middle * codes.scale.float())
    groups = -(-codes.shape[1] // group)

    def of_groups(scales: torch.Tensor) -> torch.Tensor:
        return scales.to(of_scales).repeat_interleave(codes.group // group, dim=1)[:, :groups]

    return QuantizedWeight(
        codes.codes.to(torch.int8 if bits == 8 else torch.uint8),
        of_groups(codes.scale),
        None if codes.least is None else of_groups(codes.least),
        group,
    )


def pack_blocks(codes: QuantizedWeight, block: int) -> torch.Tensor:
    """Return the weight as bytes in the layout of `struct weight` in step.c: [blocks, bytes of a block].

    `block`: number of output rows in a block. The last block is padded with zeros.
    """
    outs, depth = codes.shape
    missing = -outs % block
    count = (outs + missing) // block

    def blocks(tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` [outs, groups or depth] in blocks of output rows: [blocks, groups or depth, block],
        padded with zeros."""
        if missing:
            tensor = torch.cat((tensor, tensor.new_zeros(missing, tensor.shape[1])))
        return tensor.view(count, block, -1).transpose(1, 2)

    laid = blocks(codes.codes)
    if codes.bits == 4:
        lanes = laid.view(torch.uint8).reshape(count, depth // 4, 4, 2, block // 2)
        laid = (lanes[:, :, :, 0] | lanes[:, :, :, 1] << 4).transpose(2, 3)
    of_codes = laid.reshape(count, -1).view(torch.uint8)
    scales = [codes.scale, *(() if codes.least is None else (codes.least,))]
    heads = torch.stack(
        [blocks(each) for each in scales], dim=2
    ).contiguous()  # [blocks, groups, scales, block]
    groups = heads.shape[1]
    of_heads = heads.view(torch.uint8).reshape(count, groups, -1)
    of_group = codes.group * block * codes.bits // 8
    whole = depth // codes.group
    first = of_codes[:, : whole * of_group].view(count, whole, of_group)
    parts = [torch.cat((of_heads[:, :whole], first), dim=2).reshape(count, -1)]
    if whole < groups:
        parts += [of_heads[:, whole], of_codes[:, whole * of_group :]]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
