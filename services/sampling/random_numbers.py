"""Random numbers for sampling: one for each token id at each output position of a request.

They are a function of the request's seed, the position and the id alone. So they are the same on every
worker, device and attempt, whatever else is in the batch.
"""

from collections.abc import Sequence
from typing import Final

import torch

WORD: Final = 2**64 - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
SPREAD: Final = -0x61C88647
"""First multiplier of the hash of a token id, as a signed 32-bit number, since products keep only their lower
bits.

The same holds for FIRST and SECOND.
"""
FIRST, SECOND = 0x7FEB352D, -0x7B935975
LEAST: Final = 2.0**-27
"""Smallest random number. Without it, 2**-26 of all numbers would be 0 in float32. This is their middle.

With a smaller one, some ids would be sampled that often however unlikely their tokens are.
"""
BELOW_ONE: Final = 1 - 2**-24
"""Largest random number: the largest float32 below 1."""


def numbers(places: Sequence[tuple[int, int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return random numbers [places, vocabulary] between 0 and 1, exclusive: one for each token id at each of
    `places`.

    They are uniform over seeds, positions and ids. `places`: pairs of request seed and output position.
    """
    keys = torch.tensor([_halves(*place) for place in places], dtype=torch.int32, device=device)
    bits = torch.arange(vocabulary, dtype=torch.int32, device=device).mul_(SPREAD) ^ keys[:, :1]
    _fold(bits, 16).mul_(FIRST).bitwise_xor_(keys[:, 1:])
    _fold(bits, 15).mul_(SECOND)
    even = _fold(bits, 16).to(torch.float32)
    return even.add_(2**31 + 0.5).mul_(2.0**-32).clamp_(LEAST, BELOW_ONE)


def _fold(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Mix the upper bits of each number into its lower ones, in place. `by`: distance in bits."""
    return bits.bitwise_xor_((bits >> by).bitwise_and_((1 << (32 - by)) - 1))


def _halves(seed: int, position: int) -> tuple[int, int]:
    """Return a hash of 64 bits of a seed and an output position, as two signed numbers of 32 bits."""
    word = _mix(_mix(seed & WORD) + (position + 1) * GOLDEN)
    return (word & 0xFFFFFFFF) - 2**31, (word >> 32) - 2**31


def _mix(word: int) -> int:
    """Return SplitMix64's hash of a 64-bit `word`: each input bit changes about half of the output bits."""
    word = (word + GOLDEN) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)
