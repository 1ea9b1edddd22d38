"""Layout of KV memory: where the vectors of a token lie in a worker's pages.

The layers of a model form groups. Each group has its own geometry, pages and pool. One page of a group
holds `page_tokens` tokens of all its layers on this rank, laid out as

    [head][layer][plane][token][element]

So a page is one contiguous run of bytes, for few and large descriptors. The heads of a tensor-parallel rank
are one run of a page, so that different tensor-parallel sizes are descriptor arithmetic. The same holds for
the layers of a pipeline rank, head by head. A strip is one head's vectors of one plane and layer over the
positions of a page. No other module knows the number of planes or the length of their vectors.

An engine may write the strips of one head and layer in an encoding of its own, of as many bytes. It is named,
so that engines which write differently never hand over to each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from math import lcm
from typing import Final, TypeAlias

from baton.ids import PageCounts

NOT_QUANTIZED: Final = "none"
PLAIN: Final = "plain"
"""Encoding of pages whose strips are vectors as this module describes them."""
DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
GROUPS_MAX: Final = 4
"""Most groups of one layout, since a metadata record has as many page counts."""
PLANES_MAX: Final = 8
"""Most planes of one group."""


class KvKind(Enum):
    """Kind of a group: the tokens whose vectors it keeps."""

    FULL = "full"
    """All tokens: its pages grow with the sequence."""


@dataclass(frozen=True, slots=True)
class KvPlane:
    """One of the vectors that a group keeps for each token, layer and head."""

    name: str
    elements: int
    """Number of elements of one vector."""

    def __str__(self) -> str:
        return f"{self.name} {self.elements}"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Geometry of the pages of some layers, as one rank or a whole worker has them."""

    kind: KvKind
    dtype: str
    page_tokens: int
    layers: tuple[int, ...]
    """Global ids of the layers here, ascending. A layer is in one group at most."""
    heads: tuple[int, ...]
    """Global ids of the KV heads here, ascending. Tensor-parallel ranks split them, or replicate them if
    there are fewer heads than ranks."""
    planes: tuple[KvPlane, ...]
    encoding: str = PLAIN
    """How the engine writes the bytes of one head, layer and page. With another encoding than PLAIN only
    whole pages of equal size can be handed over. Peers must agree on it."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, heads and planes here."""
        return len(self.layers) * len(self.heads) * sum(self.vector_bytes(each) for each in self.planes)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def vector_bytes(self, plane: KvPlane) -> int:
        """Return the bytes of one vector of `plane`."""
        return plane.elements * DTYPE_BYTES[self.dtype]

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield (layer, head) in the order of a page, where each pair has a strip of every plane."""
        for head, layer in product(self.heads, self.layers):
            yield layer, head


def full_group(
    dtype: str, page_tokens: int, layers: tuple[int, ...], heads: tuple[int, ...], head_dim: int
) -> KvGroup:
    """Return a group with keys and values of every token, `head_dim` elements each."""
    planes = (KvPlane("k", head_dim), KvPlane("v", head_dim))
    return KvGroup(KvKind.FULL, dtype, page_tokens, layers, heads, planes)


GroupHead: TypeAlias = tuple[int, int]
"""Number of a group, and id of one of its KV heads."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of one rank's KV memory, or of a whole worker's. Two workers whose layouts map onto each other
    can hand over."""

    model: str
    """Fingerprint of the model's configuration and weights; peers must agree on it."""
    groups: tuple[KvGroup, ...]
    """Groups, in an order that peers must agree on. A group without a layer on a rank is present without
    layers."""
    context_length: int = 0
    """Most tokens of a sequence, on which the rotation of some models' keys depends. Peers must agree on
    it. 0: not given."""
    quantize: str = NOT_QUANTIZED
    """Quantization of the weights. Peers must agree on it, because keys and values depend on it."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Global ids of all layers here, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @property
    def heads(self) -> tuple[GroupHead, ...]:
        """All KV heads here."""
        return tuple((number, head) for number, group in enumerate(self.groups) for head in group.heads)

    @property
    def page_tokens(self) -> tuple[int, ...]:
        """Tokens per page, by group."""
        return tuple(group.page_tokens for group in self.groups)

    @property
    def block_tokens(self) -> int:
        """Positions of a block, the fewest that fill whole pages of every group."""
        return lcm(*self.page_tokens)

    def pages_for(self, tokens: int) -> PageCounts:
        """Return the numbers of pages for `tokens` tokens, by group."""
        return tuple(group.pages_for(tokens) for group in self.groups)
