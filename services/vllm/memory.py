"""KV memory of one group of layers, laid out as Baton's pages. The layers of vLLM's model are views of it.

Block 0 of vLLM is its null block, which padded rows name. It lies before the first page here, so page p is
block p + 1, and no page is ever the null block.
"""

from collections.abc import Sequence
from typing import Final

import torch

from baton.inference.kv_memory import DTYPES
from baton.inference.page_memory import PageMemory
from baton.pages.layout import KvGroup

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
NULL_BLOCKS: Final = 1
"""Blocks before the first page."""


class VllmKvMemory(PageMemory):
    """KV pages behind a null block. `layers` are views of them, or copies, as vLLM's attention takes them."""

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
        super().__init__(group, pages, device, pages_before=NULL_BLOCKS)
        if copies:
            self.layers = self._copies = [each.new_zeros(each.shape) for each in self._views]

    def copy_layers(self, pages: Sequence[int], *, back: bool) -> None:
        """Copy `pages` to the layers, or `back` from them, if the layers are copies."""
        if self._copies:
            blocks = torch.tensor(pages) + NULL_BLOCKS
            for copy, view in zip(self._copies, self._views, strict=True):
                source, target = (copy, view) if back else (view, copy)
                target[blocks] = source[blocks]

    def clear_tail(self, page: int, used: int) -> None:
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
        self.address: int = pages.data_ptr()
        self.tensor = pages.view(self.pages, heads, layers, planes, size, elements)
        """[page][kv head][layer][plane][token][elements], in the order of the encoding within a layer."""
        self._values = None
        if self._values_at is not None:
            self._values = pages[..., self._values_at :].view(self.pages, heads, layers, size, -1)
        strides = (heads * layers * inner, layers * inner, vector, 1)
        shape = (NULL_BLOCKS + self.pages, heads, size, vector)
        self._views = [flat.as_strided(shape, strides, layer * inner) for layer in range(layers)]
        self.layers = self._copies or self._views
        """The layers, [block][kv head][token][elements of all planes] each."""
