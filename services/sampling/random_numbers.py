"""Which random numbers belong to the i-th output token of a request? One for each id that it may have.

A function of the request's seed, of i and of the id alone: the same on every worker, device and attempt,
whatever else is in the batch.
"""

from collections.abc import Sequence
from typing import Final

import torch

WORD: Final = 2**64 - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
SPREAD: Final = -0x61C88647
"""Of 32 bits, as the next two: signed, since a product keeps its lower bits alone."""
FIRST, SECOND = 0x7FEB352D, -0x7B935975
LEAST: Final = 2.0**-27
"""The lowest 2**-26 of all numbers are 0 in float32: this is the middle of them. Were it a smaller one, ids
would come first that often, however unlikely their tokens are."""
BELOW_ONE: Final = 1 - 2**-24
"""The largest number of float32 below 1."""


def numbers(places: Sequence[tuple[int, int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """[places, vocabulary]: numbers above 0 and below 1, evenly spread over seeds, positions and ids.
    `places`: each a seed and a position."""
    keys = torch.tensor([_halves(*place) for place in places], dtype=torch.int32, device=device)
    bits = torch.arange(vocabulary, dtype=torch.int32, device=device).mul_(SPREAD) ^ keys[:, :1]
    _fold(bits, 16).mul_(FIRST).bitwise_xor_(keys[:, 1:])
    _fold(bits, 15).mul_(SECOND)
    even = _fold(bits, 16).to(torch.float32)
    return even.add_(2**31 + 0.5).mul_(2.0**-32).clamp_(LEAST, BELOW_ONE)


def _fold(bits: torch.Tensor, by: int) -> torch.Tensor:
    """The upper of 32 bits change the lower ones. In place."""
    return bits.bitwise_xor_((bits >> by).bitwise_and_((1 << (32 - by)) - 1))


def _halves(seed: int, position: int) -> tuple[int, int]:
    """64 bits of this place, as two signed numbers."""
    word = _mix(_mix(seed & WORD) + (position + 1) * GOLDEN)
    return (word & 0xFFFFFFFF) - 2**31, (word >> 32) - 2**31


def _mix(word: int) -> int:
    """SplitMix64's finaliser: every bit of `word` changes about half of the bits that come out."""
    word = (word + GOLDEN) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)
