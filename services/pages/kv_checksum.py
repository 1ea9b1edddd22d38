"""Checksum of the contents of KV pages, which is the same for every division of them into parts.

```
sum over groups, layers, planes, KV heads and positions, modulo 2**64, of

    mix(key(layer, plane, head, position) + vector)

vector = sum over i of word[i] * multiplier(i), the words of one head's vector of one plane and position
```

The sum over different ranks, page sizes or windows is the sum of its parts. Each word of a vector has its own
multiplier, so its position counts. Each vector has its own key, so that swapped, missing or misplaced vectors
are found, and a vector of zeros counts like any other.

Pages in an encoding have no vectors by position. There the sum is over whole pages: all bytes of one head and
layer of a page are one vector, of plane 0, and the page's number in the sequence is its position.

A single wrong bit is always found. Any other difference stays unnoticed by chance, at worst once in 2**32.
The sum finds faults of memory, transport and bookkeeping. It does not protect from deliberate changes.
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
    """Checks of a hand-over beyond the seal, the room, the generation and the counts, which are always
    checked."""

    OFF = "off"
    """No further check."""
    RECORD = "record"
    """Checksum of the record."""
    PAGES = "pages"
    """Checksum of the record, and the sum of the pages' contents. The sender sums what it computed, the
    receiver what landed."""


def mix(value: int) -> int:
    """Map a 64-bit number to another one, one to one and without patterns (the finaliser of splitmix64)."""
    value &= WORD
    value = ((value ^ (value >> 30)) * MIX[0]) & WORD
    value = ((value ^ (value >> 27)) * MIX[1]) & WORD
    return value ^ (value >> 31)


def multiplier(index: int) -> int:
    """Return the factor of the index-th word of a vector. It is odd, so that no bit is lost."""
    return mix(_MULTIPLIERS + index * GAMMA) | 1


def lane(layer: int, plane: int, head: int) -> int:
    """Return the start of the keys of one head's vectors of a plane.

    `layer`, `head`: global ids. `plane`: number in the layer's group.
    """
    return mix(mix(_LANES + layer * PLANES_MAX + plane) + head * GAMMA)


def key(lane: int, position: int) -> int:
    """Return the key of the vector at one position."""
    return mix(lane + position * GAMMA)


def word_bytes(vector_bytes: int) -> int:
    """Return the bytes of a word of a vector.

    Words are narrower than the sum. Otherwise a bit lost at the top could hide two flipped signs.
    """
    return 4 if vector_bytes % 4 == 0 else 2


def nonzero_sum(total: int) -> int:
    """Return a sum as a record carries it, where 0 means that none was computed."""
    return total & WORD or 1
