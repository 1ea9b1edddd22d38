"""Where does memory come from that peers may address by its number, and that must never move?"""

import ctypes
import mmap


class HostMemory:
    """Zeroed, page-aligned bytes of this process at a fixed address, until it ends."""

    def __init__(self, length: int) -> None:
        """`length` > 0 bytes."""
        self._map = mmap.mmap(-1, length)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.length = length
        self.view = memoryview(self._map)
