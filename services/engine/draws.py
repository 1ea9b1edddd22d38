"""Which random number belongs to the i-th output token of a request?

A function of the request's seed and i alone: the same on every worker, device and attempt, whatever else
is in the batch.
"""

from typing import Final

WORD: Final = 2**64 - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
BITS: Final = 52
"""Of the number drawn: few enough that `u * total < total` holds for any total in double precision."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), evenly spread over seeds and over positions."""
    word = _mix(_mix(seed & WORD) + (position + 1) * GOLDEN)
    return (word >> (64 - BITS)) / float(2**BITS)


def _mix(word: int) -> int:
    """SplitMix64's finaliser: every bit of `word` changes about half of the bits that come out."""
    word = (word + GOLDEN) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)
