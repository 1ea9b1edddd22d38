"""KV cache of a rank: one tensor for a group of layers, laid out as in `services/pages/layout.py`.

The cache does not know which sequence owns which page.
"""

from typing import Final

import torch

from baton.engine.available_memory import memory_shortage
from baton.inference.kv_memory import DTYPES, NotEnoughMemory
from baton.pages.layout import KvGroup
from baton.runtime.host_memory import CannotMove, HostMemory

ALIGNMENT: Final = 4096


class PagedKvCache:
    """Memory for `pages` KV pages on one device. Page p starts at byte `p * group.page_bytes`.

    Contents are undefined until written. The memory stays at its address until `move`.
    """

    def __init__(self, group: KvGroup, pages: int, device: torch.device, beside: int = 0) -> None:
        """Allocate the memory. Raises NotEnoughMemory.

        `group`: KV group, whose planes are keys and values of one length. `beside`: bytes that are to be left
        on the device.
        """
        self.group = group
        self.planes = len(group.planes)
        (self.head_dim,) = {plane.elements for plane in group.planes}
        self.pages = pages
        self.length = pages * group.page_bytes
        """Size of the memory in bytes."""
        self.device = str(device)
        """Name of the device: "cpu" or "cuda:N"."""
        self.rows_per_head = len(group.layers) * self.planes * group.page_tokens
        self.rows_per_page = len(group.heads) * self.rows_per_head
        _check_available(self.length, beside, device, group)
        try:
            self._host = HostMemory(self.length) if device.type == "cpu" else None
            self._make_views(_bytes(self._host, self.length, device))
        except (RuntimeError, MemoryError) as error:  # torch has no error class for it
            raise NotEnoughMemory(
                f"--kv-cache-memory asks for {self.length} bytes, which {device} refuses: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def populate(self) -> None:
        """Have the operating system provide all of the memory now, as `HostMemory.populate` does."""
        if self._host is not None:
            self._host.populate()

    def _make_views(self, memory: torch.Tensor) -> None:
        """Make the tensor views of the bytes in `memory` that steps use, such as `tensor`. Called again after
        a move."""
        group, size = self.group, self.group.page_tokens
        flat = memory.view(DTYPES[group.dtype])
        self.address: int = flat.data_ptr()
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

    def move(self) -> None:
        """Move the contents to another address, so that writes of peers to the old one change nothing.

        Call it while no step runs. Views that were taken before show the old address. If it raises
        CannotMove, nothing has changed. On a GPU it always does: there the process has to end and start anew,
        which takes the memory away from every writer.
        """
        if self._host is None:
            raise CannotMove(f"KV memory on {self.device} cannot be moved within its process")
        self._host.move()
        self._make_views(_bytes(self._host, self.length, torch.device("cpu")))

    @property
    def tokens(self) -> int:
        """Number of tokens whose keys and values fit into all pages."""
        return self.pages * self.group.page_tokens

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


def _check_available(length: int, beside: int, device: torch.device, group: KvGroup) -> None:
    short = memory_shortage(device, length + beside)
    if short is not None:
        also = f" and {beside} beside it for steps" if beside else ""
        raise NotEnoughMemory(
            f"--kv-cache-memory asks for {length} bytes on {device}{also}, but {short} "
            f"(room for {short.size // group.token_bytes} tokens)"
        )


def _bytes(host: HostMemory | None, length: int, device: torch.device) -> torch.Tensor:
    """Return `length` bytes as a tensor, aligned to memory pages: those of `host`, or new ones on
    `device`."""
    if host is not None:
        return torch.frombuffer(host.view, dtype=torch.uint8)
    memory = torch.empty(length + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + length]
