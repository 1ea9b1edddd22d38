"""Where in a worker's KV memory does what is kept of a token lie?

What a model keeps of a sequence lies in groups of its layers: each has a geometry, pages and a pool of its
own. One page of a group holds `page_tokens` tokens of every layer of it that this rank has, laid out as

    [head][layer][plane][token][element]

so that a page is one contiguous run of bytes (few, large descriptors), the heads that a tensor-parallel rank
holds are one run of a page (differing tensor-parallel sizes are descriptor arithmetic), and so are the
layers that a pipeline rank holds, head by head. A strip is one head's vectors of one plane and layer over the
positions of a page. Nothing outside this module knows how many planes there are, or how long their vectors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from math import lcm
from typing import Final, TypeAlias

from baton.ids import PageCounts

NOT_QUANTIZED: Final = "none"
DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
GROUPS_MAX: Final = 4
"""Of one layout: a metadata record counts the pages of so many."""
PLANES_MAX: Final = 8
"""Of one group."""


class KvKind(Enum):
    """Of which tokens a group keeps something."""

    FULL = "full"
    """Of all: its pages grow with the sequence."""


@dataclass(frozen=True, slots=True)
class KvPlane:
    """One of the vectors that a group keeps of each token, layer and head."""

    name: str
    elements: int
    """Of one vector."""

    def __str__(self) -> str:
        return f"{self.name} {self.elements}"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Geometry of the pages of some layers, as one rank or a whole worker has them."""

    kind: KvKind
    dtype: str
    page_tokens: int
    layers: tuple[int, ...]
    """Global layer ids that are held, ascending. A layer is in one group at most."""
    heads: tuple[int, ...]
    """Global KV head ids that are held, ascending: over tensor-parallel ranks they are split or, where there
    are fewer than ranks, replicated."""
    planes: tuple[KvPlane, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, heads and planes that are held."""
        return len(self.layers) * len(self.heads) * sum(self.vector_bytes(each) for each in self.planes)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def vector_bytes(self, plane: KvPlane) -> int:
        """Bytes of one vector of `plane`."""
        return plane.elements * DTYPE_BYTES[self.dtype]

    def places(self) -> Iterator[tuple[int, int]]:
        """(layer, head) as they lie in a page: each has a strip of every plane there, in their order."""
        for head, layer in product(self.heads, self.layers):
            yield layer, head


def full_group(
    dtype: str, page_tokens: int, layers: tuple[int, ...], heads: tuple[int, ...], head_dim: int
) -> KvGroup:
    """Keys and values of every token, `head_dim` elements each."""
    planes = (KvPlane("k", head_dim), KvPlane("v", head_dim))
    return KvGroup(KvKind.FULL, dtype, page_tokens, layers, heads, planes)


GroupHead: TypeAlias = tuple[int, int]
"""(number of a group, id of a KV head of it)"""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Of one rank's KV memory, or of a whole worker's. Two workers whose layouts map onto each other can hand
    over."""

    model: str
    """Fingerprint of the model's configuration and weights; peers must agree on it."""
    groups: tuple[KvGroup, ...]
    """In an order that peers must agree on; on a rank that has no layer of one, that one has no layers."""
    context_length: int = 0
    """Most tokens of a sequence, by which the keys of some models are turned: peers must agree on it. 0: not
    said."""
    quantize: str = NOT_QUANTIZED
    """As which codes weights are kept: peers must agree on it, since keys and values are made with what those
    stand for."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Global ids of all layers that are held, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @property
    def heads(self) -> tuple[GroupHead, ...]:
        """All KV heads that are held."""
        return tuple((number, head) for number, group in enumerate(self.groups) for head in group.heads)

    @property
    def page_tokens(self) -> tuple[int, ...]:
        """Of each group."""
        return tuple(group.page_tokens for group in self.groups)

    @property
    def block_tokens(self) -> int:
        """Positions of a block: the fewest of which every group has whole pages."""
        return lcm(*self.page_tokens)

    def pages_for(self, tokens: int) -> PageCounts:
        """Pages that hold `tokens` tokens, by group."""
        return tuple(group.pages_for(tokens) for group in self.groups)
