"""States of simulated sequences: memory that says which tokens each state stands for, in virtual time."""

from collections.abc import Sequence
from hashlib import shake_128
from typing import Final

from baton.pages.kv_checksum import WORD, key, lane, mix, multiplier, word_bytes
from baton.pages.layout import KvGroup, KvPlane, state_group
from baton.runtime.host_memory import HostMemory

LAYERS: Final = (1, 4)
"""Layers with a state, between those with pages."""
PLANES: Final = (KvPlane("convolution", 1), KvPlane("recurrent", 2))


def states_of(context: int) -> KvGroup:
    """Return the group of the simulated model's states, which all tensor ranks hold."""
    return state_group("float32", context, LAYERS, (0,), PLANES)


class SimulatedStates:
    """Memory of one rank for states, and their right content."""

    def __init__(self, group: KvGroup, pages: int) -> None:
        self._group = group
        self._layer_bytes = sum(map(group.vector_bytes, group.planes))
        self.page_bytes = group.page_bytes
        self.memory = HostMemory(max(pages * group.page_bytes, 1))

    def right(self, known: Sequence[int]) -> bytes:
        """Return the state behind the tokens `known`, in each layer of this rank."""
        return b"".join(
            shake_128(f"{layer} {hash(tuple(known))}".encode()).digest(self._layer_bytes)
            for layer in self._group.layers
        )

    def holds(self, page: int, known: Sequence[int]) -> bool:
        """Return whether a page has the state behind `known`."""
        return bytes(self._of(page)) == self.right(known)

    def write(self, page: int, known: Sequence[int]) -> None:
        """Write the state behind `known` to a page. No tokens stand for the noise in a step."""
        self._of(page)[:] = self.right(known)

    def copy(self, source: int, target: int) -> None:
        self._of(target)[:] = self._of(source)

    def summed(self, content: bytes | memoryview) -> int:
        """Return the checksum of a state, each layer of it one vector, as `page_checksum` computes it."""
        width, total = word_bytes(self._layer_bytes), 0
        for number, layer in enumerate(self._group.layers):
            vector = content[number * self._layer_bytes : (number + 1) * self._layer_bytes]
            words = (vector[at : at + width] for at in range(0, len(vector), width))
            product = sum(
                int.from_bytes(word, "little", signed=True) * multiplier(index)
                for index, word in enumerate(words)
            )
            total += mix(key(lane(layer, 0, 0), 0) + product)
        return total & WORD

    def there(self, page: int) -> memoryview:
        """Return the present content of a page."""
        return self._of(page)

    def _of(self, page: int) -> memoryview:
        return self.memory.view[page * self.page_bytes : (page + 1) * self.page_bytes]
