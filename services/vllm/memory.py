"""KV memory of groups of layers, laid out as Baton's pages. The layers of vLLM's model are views of it.

Block 0 of vLLM is its null block, which padded rows name. It lies before the first page here, so page p is
block p + 1, and no page is ever the null block.
"""

from collections.abc import Sequence
from typing import Final

import torch

from baton.engine_interface import Row
from baton.inference.kv_memory import DTYPES
from baton.inference.page_memory import PageMemory
from baton.pages.layout import KvGroup

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
NULL_BLOCKS: Final = 1
"""Blocks before the first page."""


class VllmKvMemory(PageMemory):
    """KV pages of one group behind a null block. `layers` are what vLLM's attention reads and writes."""

    tensor: torch.Tensor
    layers: list[torch.Tensor]
    """The layers as vLLM binds them, [block][kv head][token][elements of all planes] each."""

    def __init__(self, group: KvGroup, pages: int, device: torch.device) -> None:
        """Allocate the memory, as `PageMemory` does. Raises NotEnoughMemory."""
        super().__init__(group, pages, device, pages_before=NULL_BLOCKS)

    def prepare(self, row: Row, table: Sequence[int], cleared: object) -> int | None:
        """Prepare the pages of `table` for the tokens of `row`.

        Returns the page whose unused end holds zeros. `cleared`: what this returned for the last row of the
        same sequence, or None.
        """
        raise NotImplementedError

    def load(self, tables: Sequence[Sequence[int]]) -> None:
        """Let `layers` have the contents of these pages. Called before a step."""

    def store(self, tables: Sequence[Sequence[int]]) -> None:
        """Let these pages have the contents of `layers`. Called after a step."""


class AttentionMemory(VllmKvMemory):
    """Keys and values of each token. `layers` are views of them, or copies, as attention takes them."""

    def __init__(
        self, group: KvGroup, pages: int, device: torch.device, values_at: int | None, *, copies: bool = False
    ) -> None:
        """Allocate the memory, as `PageMemory` does. Raises NotEnoughMemory.

        `values_at`: number of elements before the vectors that attention adds up, of one page, head and
        layer. None if they do not lie token by token. `copies`: let layers be copies, each in one run of
        memory, for a back end that takes no other.
        """
        self._values_at = values_at
        self._copies: list[torch.Tensor] = []
        super().__init__(group, pages, device)
        if copies:
            self.layers = self._copies = [each.new_zeros(each.shape) for each in self._views]

    def prepare(self, row: Row, table: Sequence[int], cleared: object) -> int | None:
        """Zero the unused end of the row's last page, unless it was zeroed for this sequence before.

        A page that the row enters is zeroed as a whole.
        """
        size = self.group.page_tokens
        index, used = (row.end - 1) // size, (row.end - 1) % size + 1
        page = table[index]
        if used < size and row.start <= index * size:
            self.tensor[page].zero_()
        elif used < size and cleared != page:
            self._clear_tail(page, used)
        return page

    def load(self, tables: Sequence[Sequence[int]]) -> None:
        self._copy(tables, self._views, self._copies)

    def store(self, tables: Sequence[Sequence[int]]) -> None:
        self._copy(tables, self._copies, self._views)

    def _copy(
        self, tables: Sequence[Sequence[int]], sources: list[torch.Tensor], targets: list[torch.Tensor]
    ) -> None:
        if self._copies:
            blocks = torch.tensor([page for table in tables for page in table]) + NULL_BLOCKS
            for source, target in zip(sources, targets, strict=True):
                target[blocks] = source[blocks]

    def _clear_tail(self, page: int, used: int) -> None:
        """Zero the values behind the first `used` tokens of `page` in every layer, if they lie by token.

        Attention multiplies them by a weight of zero, and zero times a stale NaN is NaN. Stale keys do no
        harm, since their scores are replaced.
        """
        if self._values is not None:
            self._values[page, :, :, used:].zero_()

    def _make_views(self, memory: torch.Tensor) -> None:
        """Make all views of `memory`, the bytes of the null block and of all pages."""
        group, size = self.group, self.group.page_tokens
        heads, layers, planes = len(group.heads), len(group.layers), len(group.planes)
        flat = memory.view(DTYPES[group.dtype])
        (elements,) = {plane.elements for plane in group.planes}
        vector = planes * elements
        inner = size * vector
        pages = flat[NULL_BLOCKS * heads * layers * inner :].view(self.pages, heads, layers, inner)
        self.address = pages.data_ptr()
        self.tensor = pages.view(self.pages, heads, layers, planes, size, elements)
        """[page][kv head][layer][plane][token][elements], in the order of the encoding within a layer."""
        self._values = None
        if self._values_at is not None:
            self._values = pages[..., self._values_at :].view(self.pages, heads, layers, size, -1)
        strides = (heads * layers * inner, layers * inner, vector, 1)
        shape = (NULL_BLOCKS + self.pages, heads, size, vector)
        self._views = [flat.as_strided(shape, strides, layer * inner) for layer in range(layers)]
        self.layers = self._copies or self._views


class StateMemory(VllmKvMemory):
    """States of sequences, one page each. A layer's state is several tensors, one behind the other."""

    def prepare(self, row: Row, table: Sequence[int], cleared: object) -> int | None:
        """Let a sequence begin with a state of zeros, since vLLM reads it before the second token."""
        del cleared
        if row.start == 0:
            self.tensor[table[0]].zero_()
        return None

    def _make_views(self, memory: torch.Tensor) -> None:
        """Make all views of `memory`. Layers are bytes, [block][1][1][byte], which vLLM divides further."""
        page, layers = self.group.page_bytes, len(self.group.layers)
        size = page // layers
        pages = memory[NULL_BLOCKS * page :]
        self.address = pages.data_ptr()
        self.tensor = pages.view(DTYPES[self.group.dtype]).view(self.pages, 1, layers, 1, 1, -1)
        """[page][1][layer][1][1][elements of all planes]."""
        shape, strides = (NULL_BLOCKS + self.pages, 1, 1, size), (page, size, size, 1)
        signed = memory.view(torch.int8)
        self.layers = [signed.as_strided(shape, strides, layer * size) for layer in range(layers)]
