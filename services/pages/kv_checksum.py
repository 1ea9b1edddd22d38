"""How are the contents of KV pages summed, so that any way of cutting them up gives the same number?

    sum over groups, layers, planes, KV heads and positions, modulo 2**64, of

        mix(key(layer, plane, head, position) + vector)

    vector = sum over i of word[i] * multiplier(i), the words of one head's vector of one plane and position

A sum over differing ranks, page sizes or windows is the sum of its parts. Within a vector every word has a
multiplier of its own, so order counts; across vectors every place has a key of its own, so that what is
swapped, missing or in another head's place is seen, and a vector of zeros counts like any other.

A single bit that differs is always seen; what else differs goes unseen by chance alone, about once in 2**32
at worst. It finds faults of memory, transport and bookkeeping. It is no protection from someone who
computes a match.
"""

from enum import Enum
from typing import Final

from baton.pages.layout import PLANES_MAX

WORD: Final = 2**64 - 1
GAMMA: Final = 0x9E3779B97F4A7C15
MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MULTIPLIERS: Final = 0x5851F42D4C957F2D
_LANES: Final = 0xD1342543DE82EF95


class KvChecksum(Enum):
    """What is checked of a hand-over, beside the seal, the room, the generation and the counts, which
    always are."""

    OFF = "off"
    """Nothing more."""
    RECORD = "record"
    """The record's own checksum."""
    PAGES = "pages"
    """That, and the sum of the pages' contents: the sender's over what it computed, the receiver's over
    what landed."""


def mix(value: int) -> int:
    """A bijection of 64-bit numbers that leaves no pattern (the finaliser of splitmix64)."""
    value &= WORD
    value = ((value ^ (value >> 30)) * MIX[0]) & WORD
    value = ((value ^ (value >> 27)) * MIX[1]) & WORD
    return value ^ (value >> 31)


def multiplier(index: int) -> int:
    """What the index-th word of a vector counts with: odd, so that no bit of it is lost."""
    return mix(_MULTIPLIERS + index * GAMMA) | 1


def lane(layer: int, plane: int, head: int) -> int:
    """Where the keys of one head's vectors of a plane start. `layer` and `head`: their global ids; `plane`:
    its number in the layer's group."""
    return mix(mix(_LANES + layer * PLANES_MAX + plane) + head * GAMMA)


def key(lane: int, position: int) -> int:
    """Of one position's vector."""
    return mix(lane + position * GAMMA)


def word_bytes(vector_bytes: int) -> int:
    """How wide the words of a vector are. Narrower than the sum: a bit that is lost at its top end would
    hide two flipped signs from each other."""
    return 4 if vector_bytes % 4 == 0 else 2


def nonzero_sum(total: int) -> int:
    """A sum as it stands in a record, where 0 says that none was computed."""
    return total & WORD or 1
