"""Layout of KV memory: where the vectors of a token lie in a worker's pages.

The layers of a model form groups. Each group has its own geometry, pages and pool. One page of a group
holds `page_tokens` tokens of all its layers on this rank, laid out as

    [head][layer][plane][token][element]

A plane is one kind of vector: keys or values. A page is one contiguous run of bytes, so that transfers need
few, large descriptors. The heads of a tensor-parallel rank are one contiguous part of a page, so that workers
of different tensor-parallel sizes only need other offsets. The same holds for the layers of a pipeline rank,
head by head. A strip is one head's vectors of one plane and layer over the positions of a page. No other
module knows the number of planes or the length of their vectors.

Layers with a recurrent or convolution state keep one vector of each plane for a whole sequence. Each token
replaces it. So a sequence has one page of such a group, whatever its length.

An engine may store the strips of one head and layer in its own encoding, of as many bytes. The encoding has a
name, so that workers with different encodings never hand over to each other.
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
"""Name of the page encoding in which vectors lie in plain order (head, layer, plane, token, element), without
an engine-specific format."""
LATENT: Final = "latent"
"""Name of the plane of latent attention (MLA): the compressed keys and values, then the rotated key."""
DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
GROUPS_MAX: Final = 4
"""Most KV groups of one layout. A metadata record has space for as many page counts."""
PLANES_MAX: Final = 8
"""Most planes of one KV group. A plane is one kind of vector, such as keys or values."""


class KvKind(Enum):
    """Kind of attention of a KV group, which decides for which tokens vectors are stored."""

    FULL = "full"
    """Full attention: the vectors of all tokens are stored, so the number of pages grows with the
    sequence."""
    STATE = "state"
    """Recurrent or convolution layers: one state for a whole sequence, which each token replaces. A sequence
    has one page."""


@dataclass(frozen=True, slots=True)
class KvPlane:
    """Kind of vector that a KV group stores for each token, layer and head, such as keys or values."""

    name: str
    elements: int
    """Number of elements (such as bfloat16 numbers) of one vector of this kind."""

    def __str__(self) -> str:
        return f"{self.name} {self.elements}"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Geometry of the KV pages of a group of layers, on one rank or over a whole worker."""

    kind: KvKind
    dtype: str
    page_tokens: int
    """Tokens of a sequence that one page serves. The context length in a group of kind STATE."""
    layers: tuple[int, ...]
    """Global ids of this group's layers, ascending. A layer is in one group of a kind at most."""
    heads: tuple[int, ...]
    """Global ids of this group's KV heads, ascending. Tensor-parallel ranks split the heads, or replicate
    them if there are fewer heads than ranks."""
    planes: tuple[KvPlane, ...]
    encoding: str = PLAIN
    """Name of the format in which the engine stores one head and layer of a page. Peers must have the same
    name. With a format other than PLAIN, only whole pages of equal size can be handed over."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers, heads and planes of this group. 0 for states, which do not
        grow."""
        return 0 if self.is_state else self._position_bytes

    @property
    def is_state(self) -> bool:
        """Whether a page holds the state of a whole sequence."""
        return self.kind is KvKind.STATE

    @property
    def page_positions(self) -> int:
        """Number of vectors that a page has for each layer, head and plane: one for each of its tokens, or
        one in all if it holds a state."""
        return 1 if self.is_state else self.page_tokens

    @property
    def page_bytes(self) -> int:
        return self._position_bytes * self.page_positions

    @property
    def _position_bytes(self) -> int:
        return len(self.layers) * len(self.heads) * sum(self.vector_bytes(each) for each in self.planes)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def vector_bytes(self, plane: KvPlane) -> int:
        """Return the size of one vector of `plane` in bytes."""
        return plane.elements * DTYPE_BYTES[self.dtype]

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the (layer id, KV head id) pairs of this group, in the order in which a page stores them.

        Each pair has one strip for each plane: its vectors of that kind at all positions of the page.
        """
        for head, layer in product(self.heads, self.layers):
            yield layer, head


def full_group(
    dtype: str, page_tokens: int, layers: tuple[int, ...], heads: tuple[int, ...], head_dim: int
) -> KvGroup:
    """Return a KV group for full attention: keys and values of every token, `head_dim` elements each."""
    planes = (KvPlane("k", head_dim), KvPlane("v", head_dim))
    return KvGroup(KvKind.FULL, dtype, page_tokens, layers, heads, planes)


def latent_group(dtype: str, page_tokens: int, layers: tuple[int, ...], elements: int) -> KvGroup:
    """Return a KV group for latent attention (MLA): one vector of `elements` a token, which all heads
    share."""
    return KvGroup(KvKind.FULL, dtype, page_tokens, layers, (0,), (KvPlane(LATENT, elements),))


def state_group(
    dtype: str,
    context_length: int,
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    planes: tuple[KvPlane, ...],
    encoding: str = PLAIN,
) -> KvGroup:
    """Return a KV group for recurrent or convolution layers. `planes`: tensors of one layer's state."""
    return KvGroup(KvKind.STATE, dtype, context_length, layers, heads, planes, encoding)


GroupHead: TypeAlias = tuple[int, int]
"""One KV head of a layout, as a pair: index of its KV group, and global id of the head."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of one rank's KV memory, or of a whole worker's. Hand-overs need two workers whose layouts map
    onto each other."""

    model: str
    """Fingerprint (hash) of the model's configuration and weights. Peers must have the same one."""
    groups: tuple[KvGroup, ...]
    """KV groups, in the same order on all peers. A pipeline rank also lists groups of which it has no
    layer."""
    context_length: int = 0
    """Most tokens of a sequence (prompt and output), or 0 if not given. Peers must have the same value,
    because the rotation of some models' keys depends on it."""
    quantize: str = NOT_QUANTIZED
    """Name of the quantization of the weights. Peers must have the same one, because keys and values depend
    on it."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Global ids of all layers in this layout, ascending."""
        return tuple(sorted({layer for group in self.groups for layer in group.layers}))

    @property
    def heads(self) -> tuple[GroupHead, ...]:
        """KV heads of all groups in this layout, as pairs of group index and head id."""
        return tuple((number, head) for number, group in enumerate(self.groups) for head in group.heads)

    @property
    def page_tokens(self) -> tuple[int, ...]:
        """Tokens per page, by KV group."""
        return tuple(group.page_tokens for group in self.groups)

    @property
    def block_tokens(self) -> int:
        """Tokens per block. A block is the fewest positions that fill whole pages of every KV group that
        grows."""
        return lcm(*(group.page_tokens for group in self.groups if not group.is_state))

    @property
    def states(self) -> tuple[int, ...]:
        """Indices of the KV groups of states. A state stands for all earlier tokens and cannot be taken
        back."""
        return tuple([number for number, group in enumerate(self.groups) if group.is_state])

    def pages_for(self, tokens: int) -> PageCounts:
        """Return the number of pages that `tokens` tokens of a sequence take, by KV group."""
        return tuple(group.pages_for(tokens) for group in self.groups)

    @property
    def growth(self) -> PageCounts:
        """Number of pages that a sequence takes for its next block of tokens, by KV group. 0 for states."""
        counts = enumerate(self.pages_for(self.block_tokens))
        return tuple([0 if group in self.states else count for group, count in counts])
