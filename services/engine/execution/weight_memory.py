"""Host memory for weights that every step reads from end to end.

Weights are stored side by side in memory for which large pages are requested. A core reads these up to half
as fast again as small pages (docs/benchmarks). The C library may request them, too, but not for memory that a
thread allocates.
"""

from typing import Final

import torch

from baton.runtime.host_memory import HostMemory

AREA_BYTES: Final = 64 << 20
"""Bytes of memory that are requested from the system at once.

The system provides physical memory only for bytes that are written.
"""
LINE_BYTES: Final = 64
"""Alignment of weight tensors in memory, in bytes: the size of a CPU cache line."""


class WeightMemory:
    """Allocator of memory for weight tensors, in large areas.

    An area is freed when no tensor in it is referenced any more.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of `tensor` in this allocator's memory."""
        length = tensor.nbytes
        span = -(-length // LINE_BYTES) * LINE_BYTES
        if span > AREA_BYTES:
            area = _area(span)[:length]
        else:
            if len(self._free) < span:
                self._free = _area(AREA_BYTES)
            area, self._free = self._free[:length], self._free[span:]
        return area.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _area(length: int) -> torch.Tensor:
    """Return `length` new bytes with large pages, or from the C library if the system refuses a memory
    mapping."""
    try:
        return torch.frombuffer(HostMemory(length).view, dtype=torch.uint8)
    except MemoryError:
        return torch.empty(length, dtype=torch.uint8)
