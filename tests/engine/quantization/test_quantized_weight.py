"""Tests that codes stand for the numbers they were made of, or that a file says."""

from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from baton.engine.quantization.gguf_blocks import UNPACKED
from baton.engine.quantization.quantized_weight import (
    GROUP,
    NotQuantizable,
    QuantizedWeight,
    join_quantized,
    quantize_weight,
)

DEPTH: Final = 512
SMALL: Final = 0.01
HALVES: Final = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q6_K": (208,), "Q2_K": (80, 82)}
"""Offsets of float16 numbers in a block, if they are not its first two."""


def blocks_of(kind: GGMLQuantizationType, outs: int, depth: int) -> np.ndarray[Any, Any]:
    """Return random bytes as a tensor's blocks, with small float16 numbers in them."""
    size, of_bytes = GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(int(kind))
    blocks = draw.integers(0, 256, (outs, depth // size, of_bytes), dtype=np.uint8)
    halves = draw.normal(0, SMALL, (outs, depth // size, 2)).astype(np.float16).view(np.uint8)
    for each, place in enumerate(HALVES.get(kind.name, (0, 2))):
        blocks[..., place : place + 2] = halves[..., 2 * each : 2 * each + 2]
    return blocks.reshape(outs, -1)


@pytest.mark.parametrize("kind", UNPACKED, ids=lambda kind: str(kind.name))
def test_a_files_blocks_stand_for_the_librarys_numbers(kind: GGMLQuantizationType) -> None:
    blocks = blocks_of(kind, 5, DEPTH)
    told = dequantize(blocks, kind)
    assert torch.equal(UNPACKED[kind](blocks).numbers(), torch.from_numpy(told))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("depth", [GROUP, 80, 96, 16])
def test_each_number_is_nearest_to_its_own_code(bits: int, depth: int) -> None:
    """The distance is at most half a scale, and a scale is as large as a group's numbers need."""
    torch.manual_seed(bits)
    weight = torch.randn(7, depth) * torch.tensor([1e-7, 1e-4, 0.02, 1, 30, 1e3, 0])[:, None]
    codes = quantize_weight(weight, bits)
    groups = torch.arange(depth) // GROUP
    scale = codes.scale.float()
    assert bool(((codes.numbers() - weight).abs() <= scale[:, groups] * 0.5001).all())
    for group in range(scale.shape[1]):
        own = weight[:, groups == group]
        span = own.abs().amax(1) / 127 if bits == 8 else (own.amax(1) - own.amin(1)) / 15
        assert bool((scale[:, group] <= span * 1.01 + 2e-7).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_that_codes_stand_for_are_kept(bits: int) -> None:
    """The numbers are from a release that was quantized in this way. Nothing more is lost."""
    torch.manual_seed(bits)
    if bits == 8:
        first = torch.randint(-127, 128, (4, 64)) * 0.0078125
        first[:, ::32] = 127 * 0.0078125
    else:
        first = torch.randint(0, 16, (4, 64)) * 0.125 - 0.5
        first[:, ::32], first[:, 1::32] = -0.5, 15 * 0.125 - 0.5
    assert torch.equal(quantize_weight(first, bits).numbers(), first)


@pytest.mark.parametrize(
    ("number", "why"), [(float("nan"), "not a number"), (float("inf"), "not a number"), (1e9, "too large")]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_what_no_code_stands_for_is_said(bits: int, number: float, why: str) -> None:
    weight = torch.ones(3, 64)
    weight[1, 40] = number
    with pytest.raises(NotQuantizable, match=why):
        quantize_weight(weight, bits)


KINDS: Final = ("Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K")


@pytest.mark.parametrize(("one", "other"), [*combinations_with_replacement(KINDS, 2)])
def test_weights_side_by_side_stand_for_the_same(one: str, other: str) -> None:
    """A file may have queries, keys and values in several types."""
    parts: list[QuantizedWeight] = []
    for name in (one, other):
        kind = GGMLQuantizationType[name]
        parts.append(UNPACKED[kind](blocks_of(kind, 3, DEPTH)))
    both = join_quantized(parts)
    assert both.group == min(each.group for each in parts)
    assert torch.equal(both.numbers(), torch.cat([each.numbers() for each in parts]))


def test_rows_are_coded_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weight = torch.randn(9, 64)
    whole = quantize_weight(weight, 4).numbers()
    monkeypatch.setattr("baton.engine.quantization.quantized_weight.ROWS_A_TIME", 2)
    parts = quantize_weight(weight, 4)
    assert torch.equal(parts.numbers(), whole)
    assert torch.equal(torch.cat([numbers for _, numbers in parts.in_parts()]), whole)
