"""How is a weight kept in a few bits a number, and what numbers does it then stand for?

As codes, with a scale, and maybe a least number, for each group of a row's: number = code * scale + least.
The compiled step multiplies with codes as they are and scales what a group's products come to (`step.c`), so
that what it computes are the products of those numbers. `gguf_blocks.py` takes them from a file; here they
are made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

GROUP: Final = 32
"""Numbers of a row that share a scale, where codes are made here."""
GROUPS: Final = (16, 32)
"""Sizes that there are."""
LARGEST: Final = {8: 127, 4: 15}
"""Codes of so many bits: those of 8 have a sign."""
MIDDLE: Final = 8
"""Of codes of 4 bits without least numbers: it stands for 0."""
ROWS_A_TIME: Final = 1024
"""That are looked at, beside which little is held."""


class NotQuantizable(Exception):
    """A weight for which there are no codes. The text says why."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Of a weight."""

    codes: torch.Tensor
    """[outs, depth]: int8, or uint8 of 4 bits."""
    scale: torch.Tensor
    """[outs, groups]: float16 or float32."""
    least: torch.Tensor | None = None
    """The same. None: 0, or of 4 bits -8 times the scale."""
    group: int = GROUP

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype is torch.int8 else 4

    @property
    def nbytes(self) -> int:
        """Of a whole weight in blocks."""
        told = self.scale.nbytes * (1 if self.least is None else 2)
        return told + self.codes.numel() * self.bits // 8

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def rows(self, which: slice | torch.Tensor) -> "QuantizedWeight":
        least = None if self.least is None else self.least[which]
        return QuantizedWeight(self.codes[which], self.scale[which], least, self.group)

    def numbers(self) -> torch.Tensor:
        """What they stand for, in float32."""
        codes = self.codes.float()
        if self.least is None and self.bits == 4:
            codes -= MIDDLE
        numbers = codes.mul_(self._spread(self.scale))
        return numbers if self.least is None else numbers.add_(self._spread(self.least))

    def in_parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The same, of some rows at a time, with which they are."""
        for start in range(0, len(self.codes), ROWS_A_TIME):
            which = slice(start, start + ROWS_A_TIME)
            yield which, self.rows(which).numbers()

    def _spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        spread = of_groups.float().repeat_interleave(self.group, dim=1)
        return spread[:, : self.codes.shape[1]]


def coded(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Codes of 8 or 4 bits for `weight` [outs, depth]: for 8 the scale fits a group's largest number, and for
    4 its least number counts from, and its largest is the last code. Raises NotQuantizable."""
    parts = [_coded(part.float(), bits) for part in torch.split(weight, ROWS_A_TIME)]
    return joined(parts)


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
    """The numbers of float16 nearest to them that are no less (`up`), or no more. Raises NotQuantizable."""
    half = numbers.half()
    if not bool(torch.isfinite(half).all()):
        raise NotQuantizable("its numbers are too large for scales in float16")
    wrong = half.float() < numbers if up else half.float() > numbers
    limit = torch.tensor(float("inf") if up else float("-inf"), dtype=torch.float16)
    return torch.where(wrong, torch.nextafter(half, limit), half)


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Of weights of one depth, side by side, as one: in the form that holds all of them without loss."""
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

    def of_groups(told: torch.Tensor) -> torch.Tensor:
        return told.to(of_scales).repeat_interleave(codes.group // group, dim=1)[:, :groups]

    return QuantizedWeight(
        codes.codes.to(torch.int8 if bits == 8 else torch.uint8),
        of_groups(codes.scale),
        None if codes.least is None else of_groups(codes.least),
        group,
    )


def in_blocks(codes: QuantizedWeight, block: int) -> torch.Tensor:
    """As `struct weight` of the kernel has them, whose blocks are of so many outs: bytes, one row for each
    block. The last block is filled up with zeros."""
    outs, depth = codes.shape
    missing = -outs % block
    count = (outs + missing) // block

    def blocks(tensor: torch.Tensor) -> torch.Tensor:
        """[blocks, groups or depth, block]"""
        if missing:
            tensor = torch.cat((tensor, tensor.new_zeros(missing, tensor.shape[1])))
        return tensor.view(count, block, -1).transpose(1, 2)

    laid = blocks(codes.codes)
    if codes.bits == 4:
        lanes = laid.view(torch.uint8).reshape(count, depth // 4, 4, 2, block // 2)
        laid = (lanes[:, :, :, 0] | lanes[:, :, :, 1] << 4).transpose(2, 3)
    of_codes = laid.reshape(count, -1).view(torch.uint8)
    told = [codes.scale, *(() if codes.least is None else (codes.least,))]
    heads = torch.stack([blocks(each) for each in told], dim=2).contiguous()  # [blocks, groups, told, block]
    groups = heads.shape[1]
    of_heads = heads.view(torch.uint8).reshape(count, groups, -1)
    of_group = codes.group * block * codes.bits // 8
    whole = depth // codes.group
    first = of_codes[:, : whole * of_group].view(count, whole, of_group)
    parts = [torch.cat((of_heads[:, :whole], first), dim=2).reshape(count, -1)]
    if whole < groups:
        parts += [of_heads[:, whole], of_codes[:, whole * of_group :]]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
