"""The checksum of KV pages computed number by number from its definition, and memory to sum."""

from collections.abc import Iterable, Mapping

import torch

from baton.engine.kv_cache import PagedKvCache
from baton.pages.kv_checksum import WORD, key, lane, mix, multiplier, word_bytes
from baton.pages.layout import KvLayout

Place = tuple[int, int, int, int]
"""Layer id, plane, KV head id and position."""


def reference(vectors: Mapping[Place, bytes]) -> int:
    """Return the sum over these places."""
    return sum(_counted(place, vector) for place, vector in vectors.items()) & WORD


def _counted(place: Place, vector: bytes) -> int:
    layer, plane, head, position = place
    width = word_bytes(len(vector))
    starts = range(0, len(vector), width)
    words = [int.from_bytes(vector[at : at + width], "little", signed=True) for at in starts]
    total = sum(word * multiplier(index) for index, word in enumerate(words))
    return mix(key(lane(layer, plane, head), position) + total)


class Memory:
    """The pages of one rank, and one sequence's page table. All bytes are random until written."""

    def __init__(self, layout: KvLayout, tokens: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.layout = layout
        (self.group,) = layout.groups
        used = self.group.pages_for(tokens)
        self.cache = PagedKvCache(self.group, used + 2, torch.device("cpu"))
        self.table: list[int] = torch.randperm(used + 2, generator=draw)[:used].tolist()
        flat = self.raw.view(-1)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=draw))

    @property
    def raw(self) -> torch.Tensor:
        """[page][kv head][layer][plane][token][bytes of a vector]"""
        return self.cache.tensor.view(torch.uint8)

    def vector(self, place: Place) -> torch.Tensor:
        """Return the bytes at one place, to read and to write."""
        layer, plane, head, position = place
        page, slot = divmod(position, self.group.page_tokens)
        mine = self.raw[self.table[page], self.group.heads.index(head)]
        return mine[self.group.layers.index(layer), plane, slot]

    def places(self, start: int, stop: int) -> Iterable[Place]:
        for layer in self.group.layers:
            for plane in range(len(self.group.planes)):
                for head in self.group.heads:
                    yield from ((layer, plane, head, position) for position in range(start, stop))

    def vectors(self, start: int, stop: int) -> dict[Place, bytes]:
        return {place: bytes(self.vector(place).tolist()) for place in self.places(start, stop)}


def carry(sources: Iterable[Memory], targets: Iterable[Memory], start: int, stop: int) -> None:
    """Copy each vector to its place in each target, as any correct transfer does."""
    found = {place: memory.vector(place) for memory in sources for place in memory.places(start, stop)}
    for target in targets:
        for place in target.places(start, stop):
            target.vector(place).copy_(found[place])
