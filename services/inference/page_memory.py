"""Memory of one device for KV pages, which engines view as tensors and which can move."""

from typing import Final

import torch

from baton.inference.available_memory import memory_shortage
from baton.inference.kv_memory import NotEnoughMemory
from baton.pages.layout import KvGroup
from baton.rooms.plurals import counted
from baton.runtime.host_memory import CannotMove, HostMemory

ALIGNMENT: Final = 4096


class PageMemory:
    """Memory for `pages` KV pages on one device. Page p is at byte `p * group.page_bytes` from `address`.

    Contents are zero until written. The memory stays at its address until `move`. A class of an engine sets
    `address` and its views in `_make_views`.
    """

    address: int

    def __init__(
        self, group: KvGroup, pages: int, device: torch.device, *, pages_before: int = 0, beside: int = 0
    ) -> None:
        """Allocate the memory. Raises NotEnoughMemory.

        `pages_before`: number of pages of the engine's own before the first page. `beside`: bytes that are to
        be left on the device.
        """
        self.group = group
        self.pages = pages
        self.length = max(pages * group.page_bytes, 1)
        """Size of the memory in bytes. A pipeline stage without a layer of the group has an unused byte."""
        self.device = str(device)
        """Name of the device: "cpu" or "cuda:N"."""
        size = (pages_before + pages) * group.page_bytes or 1
        _check_available(size, beside, device, group)
        try:
            self._host = HostMemory(size) if device.type == "cpu" else None
            self._make_views(_aligned(size, device) if self._host is None else self._host_bytes())
        except (RuntimeError, MemoryError) as error:  # torch has no error class for it
            raise NotEnoughMemory(
                f"--kv-cache-memory asks for {size} bytes, which {device} refuses: "
                f"{str(error).splitlines()[0]}"
            ) from error

    @property
    def tokens(self) -> int:
        """Number of tokens whose keys and values fit into all pages."""
        return self.pages * self.group.page_tokens

    def populate(self) -> None:
        """Have the operating system provide all of the memory now, as `HostMemory.populate` does."""
        if self._host is not None:
            self._host.populate()

    def move(self) -> None:
        """Move the contents to another address, so that writes of peers to the old one change nothing.

        Call it while no step runs. Views that were taken before show the old address. If it raises
        CannotMove, nothing has changed. On a GPU it always does: there the process has to end and start anew,
        which takes the memory away from every writer.
        """
        if self._host is None:
            raise CannotMove(f"KV memory on {self.device} cannot be moved within its process")
        self._host.move()
        self._make_views(self._host_bytes())

    def _make_views(self, memory: torch.Tensor) -> None:
        """Set `address`, and make all views of `memory`, the bytes of all pages. Called after a move, too."""
        raise NotImplementedError

    def _host_bytes(self) -> torch.Tensor:
        assert self._host is not None
        return torch.frombuffer(self._host.view, dtype=torch.uint8)


def _check_available(size: int, beside: int, device: torch.device, group: KvGroup) -> None:
    short = memory_shortage(device, size + beside)
    if short is not None:
        also = f" and {beside} beside it for steps" if beside else ""
        room = counted(short.size // max(group.page_bytes, 1), "page")
        raise NotEnoughMemory(
            f"--kv-cache-memory asks for {size} bytes on {device}{also}, but {short} "
            f"(room for {room} of {group.page_tokens} tokens)"
        )


def _aligned(size: int, device: torch.device) -> torch.Tensor:
    """Return `size` zero bytes on `device`, aligned to pages of memory."""
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size]
