"""Where do the keys and values of all sequences lie in this worker's memory?

One tensor for a group of layers, laid out as `services/pages/layout.py` says. Who owns which page is not
known here.
"""

from typing import Final

import torch

from baton.engine.available_memory import memory_shortage
from baton.pages.layout import KvGroup
from baton.rooms.plurals import counted
from baton.runtime.errors import StartupError
from baton.runtime.host_memory import CannotMove, HostMemory

ALIGNMENT: Final = 4096
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class NotEnoughMemory(StartupError):
    """The KV cache cannot be had, or would hold nothing. The text has both sizes."""


def pages_that_fit(group: KvGroup, memory_bytes: int, tokens_min: int = 1) -> int:
    """How many whole pages fit into `memory_bytes`. Raises NotEnoughMemory if they hold less than
    `tokens_min` tokens."""
    pages, needed = memory_bytes // group.page_bytes, group.pages_for(tokens_min)
    if pages < needed:
        raise NotEnoughMemory(
            f"--kv-cache-memory {memory_bytes} holds {counted(pages, 'page')} of {group.page_tokens} tokens,"
            f" and {needed} are needed at least: {needed * group.page_bytes} bytes"
        )
    return pages


class PagedKvCache:
    """`pages` pages of KV memory on one device, page p at byte `p * group.page_bytes`.

    Contents are undefined until written. The memory stays where it is until `move`.
    """

    def __init__(self, group: KvGroup, pages: int, device: torch.device, beside: int = 0) -> None:
        """Of a group whose planes are keys and values of one length. Raises NotEnoughMemory if the device has
        less left than `pages` take, and `beside`, in bytes, what else is to be taken there."""
        self.group = group
        self.planes = len(group.planes)
        (self.head_dim,) = {plane.elements for plane in group.planes}
        self.pages = pages
        self.length = pages * group.page_bytes
        """Bytes."""
        self.device = str(device)
        """"cpu" or "cuda:N"."""
        self.rows_per_head = len(group.layers) * self.planes * group.page_tokens
        self.rows_per_page = len(group.heads) * self.rows_per_head
        _check_available(self.length, beside, device, group)
        try:
            self._host = HostMemory(self.length) if device.type == "cpu" else None
            self._look(_bytes(self._host, self.length, device))
        except (RuntimeError, MemoryError) as error:  # torch has no error class of its own for it
            raise NotEnoughMemory(
                f"--kv-cache-memory asks for {self.length} bytes, which {device} refuses: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def populate(self) -> None:
        """Have all of it now: see `HostMemory.populate`."""
        if self._host is not None:
            self._host.populate()

    def _look(self, memory: torch.Tensor) -> None:
        """Every way of looking at the bytes of `memory`."""
        group, size = self.group, self.group.page_tokens
        flat = memory.view(DTYPES[group.dtype])
        self.address: int = flat.data_ptr()
        self.tensor = flat.view(
            self.pages, len(group.heads), len(group.layers), self.planes, size, self.head_dim
        )
        """[page][kv head][layer][plane][token][head_dim]"""
        rows = flat.view(-1, self.head_dim)
        pages = self.tensor.flatten(4)
        self.places = {layer: place for place, layer in enumerate(group.layers)}
        """Of a layer's id among the layers that are here."""
        self._pages = {layer: pages[:, :, place] for layer, place in self.places.items()}
        kinds = self.tensor.permute(3, 2, 0, 4, 1, 5)
        """[plane][layer][page][token][kv head][head_dim]"""
        self._kinds = {layer: tuple(kinds[:, place]) for layer, place in self.places.items()}
        self._rows = {layer: rows[self.planes * place * size :] for layer, place in self.places.items()}

    def move(self) -> None:
        """Take the contents to another address: what peers write to the old one changes nothing here.

        While no step runs; a tensor that was taken before shows the old address. Raises CannotMove, and
        nothing has changed. On a GPU it always does: there the process has to end, which takes memory away
        from every writer, and to be started anew.
        """
        if self._host is None:
            raise CannotMove(f"KV memory on {self.device} cannot be moved within its process")
        self._host.move()
        self._look(_bytes(self._host, self.length, torch.device("cpu")))

    @property
    def tokens(self) -> int:
        """How many tokens fit."""
        return self.pages * self.group.page_tokens

    def write(self, layer: int, rows: torch.Tensor, entries: torch.Tensor) -> None:
        """Store `entries` [rows, head_dim], keys or values of the layer with that id.

        `rows`: page * rows_per_page + head * rows_per_head + place in the page for a key, page_tokens more
        for a value.
        """
        self._rows[layer].index_copy_(0, rows, entries)

    def read(self, layer: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copy what `pages` [N] hold of the layer with that id into `out` [N, kv heads, planes,
        page_tokens * head_dim], keys before values. `out` may lie in any order: entries of one head and kind,
        side by side, are one matrix."""
        torch.index_select(self._pages[layer], 0, pages, out=out)

    def kinds(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Where the keys and the values of the layer with that id lie, [page, token, kv head, head_dim]
        each, with strides: what is written there is seen."""
        return self._kinds[layer]

    def clear_tail(self, page: int, used: int) -> None:
        """Zero what lies behind the first `used` tokens of `page`, in every layer.

        Attention multiplies the values there by a weight of zero, and zero times a stale NaN is NaN.
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
    """`length` page-aligned bytes: those of `host`, else new ones of `device`."""
    if host is not None:
        return torch.frombuffer(host.view, dtype=torch.uint8)
    memory = torch.empty(length + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + length]
