"""KV caches of a rank: the memory of each KV group, laid out as in `services/pages/layout.py`.

A cache does not know which sequence owns which page.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch

from baton.inference.kv_memory import DTYPES
from baton.inference.page_memory import PageMemory
from baton.pages.layout import KvGroup, full_group


class PagedKvCache(PageMemory):
    """KV pages of the torch engine: keys and values of one length, with a vector for each token."""

    def __init__(self, group: KvGroup, pages: int, device: torch.device, beside: int = 0) -> None:
        """Allocate the memory, as `PageMemory` does. Raises NotEnoughMemory.

        `group`: KV group, whose planes are keys and values of one length. `beside`: bytes that are to be left
        on the device.
        """
        self.planes = len(group.planes)
        (self.head_dim,) = {plane.elements for plane in group.planes}
        self.rows_per_head = len(group.layers) * self.planes * group.page_tokens
        self.rows_per_page = len(group.heads) * self.rows_per_head
        super().__init__(group, pages, device, beside=beside)

    def _make_views(self, memory: torch.Tensor) -> None:
        """Make the views of `memory` that steps use."""
        group, size = self.group, self.group.page_tokens
        self.address: int = memory.data_ptr()
        flat = memory[: self.pages * group.page_bytes].view(DTYPES[group.dtype])
        self.tensor = flat.view(
            self.pages, len(group.heads), len(group.layers), self.planes, size, self.head_dim
        )
        """All pages as one tensor: [page][kv head][layer][plane][token][head_dim]."""
        rows = flat.view(-1, self.head_dim)
        pages = self.tensor.flatten(4)
        self.places = {layer: index for index, layer in enumerate(group.layers)}
        """Index of each layer among the layers that this cache holds on this rank, by layer id."""
        self._pages = {layer: pages[:, :, index] for layer, index in self.places.items()}
        kinds = self.tensor.permute(3, 2, 0, 4, 1, 5)
        """View of all pages with the dimensions in another order: [plane][layer][page][token][kv
        head][head_dim]."""
        self._kinds = {layer: tuple(kinds[:, index]) for layer, index in self.places.items()}
        self._rows = {layer: rows[self.planes * index * size :] for layer, index in self.places.items()}

    def write(self, layer: int, rows: torch.Tensor, entries: torch.Tensor) -> None:
        """Store keys or values, `entries` [rows, head_dim], of the layer with id `layer`.

        `rows`: page * rows_per_page + head * rows_per_head + offset in the page for a key, page_tokens more
        for a value.
        """
        self._rows[layer].index_copy_(0, rows, entries)

    def read(self, layer: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the keys and values of `pages` [N] of the layer with id `layer` to `out`, keys before values.

        `out`: [N, kv heads, planes, page_tokens * head_dim], in any memory order. If entries of one head and
        plane are side by side, they form a matrix.
        """
        torch.index_select(self._pages[layer], 0, pages, out=out)

    def keys_and_values(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return writable views of a layer's keys and of its values, [page, token, kv head, head_dim] each.

        The views are strided.
        """
        return self._kinds[layer]

    def clear_tail(self, page: int, used: int) -> None:
        """Zero the keys and values behind the first `used` tokens of `page`, in every layer.

        Attention multiplies their values by a weight of zero, and zero times a stale NaN is NaN.
        """
        self.tensor[page, :, :, :, used:].zero_()


class PagedStates(PageMemory):
    """Pages of the torch engine with the states of layers: one page has all states of a sequence."""

    def _make_views(self, memory: torch.Tensor) -> None:
        """Make the views of `memory` that steps use."""
        group = self.group
        self.address: int = memory.data_ptr()
        flat = memory[: self.pages * group.page_bytes].view(DTYPES[group.dtype])
        sizes = [plane.elements for plane in group.planes]
        self.tensor = flat.view(self.pages, len(group.heads), len(group.layers), sum(sizes))
        """All pages as one tensor: [page][kv head][layer][elements of all planes]."""
        places = {layer: index for index, layer in enumerate(group.layers)}
        self._states = {
            layer: {
                plane.name: self.tensor[:, 0, index, end - plane.elements : end]
                for plane, end in zip(group.planes, accumulate(sizes), strict=True)
            }
            for layer, index in places.items()
        }

    def states(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return writable views of a layer's states by name, [page, elements] each."""
        return self._states[layer]


EngineCache: TypeAlias = PagedKvCache | PagedStates


def attention_cache(caches: Sequence[EngineCache]) -> tuple[int, PagedKvCache] | None:
    """Return the index and the cache of the KV group of keys and values, or None if no layer has
    attention."""
    found = ((number, each) for number, each in enumerate(caches) if isinstance(each, PagedKvCache))
    return next(found, None)


def only_attention(caches: Sequence[EngineCache]) -> PagedKvCache:
    """Return the cache of an engine whose only KV group has keys and values."""
    (cache,) = (each for each in caches if isinstance(each, PagedKvCache))
    return cache


def empty_cache(device: torch.device) -> PagedKvCache:
    """Return a cache that stands for that of attention in a model without attention."""
    return PagedKvCache(full_group("float32", 1, (0,), (0,), 1), 1, device)


def make_cache(group: KvGroup, pages: int, device: torch.device, beside: int = 0) -> EngineCache:
    """Allocate the cache of a KV group, as `PageMemory` does. Raises NotEnoughMemory.

    `beside`: bytes that are to be left on the device.
    """
    kind = PagedStates if group.is_state else PagedKvCache
    return kind(group, pages, device, beside=beside)
