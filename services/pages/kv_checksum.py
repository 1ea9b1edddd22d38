"""Checksum of the contents of KV pages, independent of how they are divided among ranks and transfers.

```
sum over groups, layers, planes, KV heads and positions, modulo 2**64, of

    mix(key(layer, plane, head, position) + vector)

vector = sum over i of word[i] * multiplier(i), the words of one head's vector of one plane and position
```

Parts may be summed apart, by rank, page or window, and their sums added. Each word of a vector has its own
multiplier, so its position counts. Each vector has its own key, so that swapped, missing or misplaced vectors
are found, and a vector of zeros counts like any other. A plane is one kind of vector: keys or values.

Pages in an engine-specific encoding have no vectors by position. There the sum is over whole pages. All bytes
of one head and layer of a page are one vector, of plane 0. Its position is the page's number in the sequence.

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
    """Setting `--kv-checksum`: checks of a hand-over besides those that are always made. The seal, the room,
    the generation and the page counts are always checked."""

    OFF = "off"
    """Setting without any checksum, neither of the record nor of the pages."""
    RECORD = "record"
    """Setting that checks the checksum of the metadata record, but not the contents of the pages."""
    PAGES = "pages"
    """Setting that checks the metadata record and a sum over the contents of the KV pages. The sender sums
    the pages that it computed, and the receiver those that landed."""


def mix(value: int) -> int:
    """Return a 64-bit hash of `value`. Different values have different hashes (the finaliser of
    splitmix64)."""
    value &= WORD
    value = ((value ^ (value >> 30)) * MIX[0]) & WORD
    value = ((value ^ (value >> 27)) * MIX[1]) & WORD
    return value ^ (value >> 31)


def multiplier(index: int) -> int:
    """Return the 64-bit factor for the word at position `index` of a vector. It is odd, so that the
    multiplication loses no bit."""
    return mix(_MULTIPLIERS + index * GAMMA) | 1


def lane(layer: int, plane: int, head: int) -> int:
    """Return the base from which `key` derives the checksum keys of all vectors of one layer, plane and KV
    head.

    `layer`, `head`: global ids. `plane`: number of the plane (keys or values) in the layer's KV group.
    """
    return mix(mix(_LANES + layer * PLANES_MAX + plane) + head * GAMMA)


def key(lane: int, position: int) -> int:
    """Return the checksum key of the vector at one token position. `lane`: result of the function `lane`."""
    return mix(lane + position * GAMMA)


def word_bytes(vector_bytes: int) -> int:
    """Return the size in bytes of the words into which the checksum divides a vector of `vector_bytes` bytes.

    Words are narrower than the 64-bit sum. Otherwise a bit lost at the top could hide two flipped signs.
    """
    return 4 if vector_bytes % 4 == 0 else 2


def nonzero_sum(total: int) -> int:
    """Return a sum of pages as a metadata record stores it. A sum of 0 becomes 1, because 0 in a record means
    that no sum was computed."""
    return total & WORD or 1
