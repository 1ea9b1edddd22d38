"""Where do weights lie that every step reads from end to end?

Side by side, in memory that is asked for in large pages: a core reads these up to half as fast again as small
ones (docs/benchmarks). The C library may ask for them, too, but not for what a thread allocates.
"""

from typing import Final

import torch

from baton.runtime.host_memory import HostMemory

AREA_BYTES: Final = 64 << 20
"""Asked of the system at once, of which it gives what is written to."""
LINE_BYTES: Final = 64
"""Where a tensor may begin: at a line of the caches."""


class WeightMemory:
    """An area is given back when nothing refers to any tensor in it."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of it."""
        length = tensor.nbytes
        span = -(-length // LINE_BYTES) * LINE_BYTES
        if span > AREA_BYTES:
            place = _area(span)[:length]
        else:
            if len(self._free) < span:
                self._free = _area(AREA_BYTES)
            place, self._free = self._free[:length], self._free[span:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _area(length: int) -> torch.Tensor:
    """So many bytes; from the C library where the system refuses them by themselves."""
    try:
        return torch.frombuffer(HostMemory(length).view, dtype=torch.uint8)
    except MemoryError:
        return torch.empty(length, dtype=torch.uint8)
