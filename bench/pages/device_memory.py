"""Memory of a benchmark that peers write to: the machine's or a GPU's."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from baton.runtime.host_memory import CannotMove, HostMemory

if TYPE_CHECKING:
    import torch


class Memory(Protocol):
    """Protocol of memory, like `baton.runtime.host_memory.Movable`."""

    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def device(self) -> str: ...
    def move(self) -> None: ...


class DeviceMemory:
    """Zeroed bytes of a GPU ("cuda:N") at one address, like a worker's KV memory."""

    def __init__(self, length: int, device: str) -> None:
        """Allocate for the calling thread, which is bound to the device. The order of calls is a worker's
        own, because CUDA has threads. Raises StartupError, or RuntimeError if the device refuses."""
        import torch

        from baton.inference.device import bind_thread
        from baton.transfer.nixl_library import install_memory_hooks

        install_memory_hooks()
        bind_thread(device)
        self.length = length
        self.device = device
        self.tensor = torch.zeros(length, dtype=torch.uint8, device=device)
        self.address: int = self.tensor.data_ptr()

    def move(self) -> None:
        """Raises CannotMove: see `baton.engine.kv_cache.PagedKvCache.move`."""
        raise CannotMove(f"memory on {self.device} cannot be moved within its process")


def numbered(device: str) -> str:
    """Return `device` with its number ("cpu", "cuda:N"). Raises StartupError for a missing device."""
    if device == "cpu":
        return device
    from baton.inference.device import find_device

    return str(find_device(device))


def take(length: int, device: str) -> HostMemory | DeviceMemory:
    """Return `length` bytes of `device`, all of them touched. Untouched pages would share one page of
    zeros."""
    if device != "cpu":
        return DeviceMemory(length, device)
    memory = HostMemory(length)
    memory.view[:] = bytes(length)
    return memory


def bytes_of(memory: Memory) -> "torch.Tensor":
    """Return the bytes as a uint8 tensor of shape [length], without a copy."""
    import torch

    if isinstance(memory, DeviceMemory):
        return memory.tensor
    if isinstance(memory, HostMemory):
        return torch.frombuffer(memory.view, dtype=torch.uint8)
    raise TypeError(type(memory).__name__)


def copying(source: Memory, at: int, target: Memory, to: int, length: int) -> Callable[[], None]:
    """Return a function that copies bytes between two memories of a device and waits for the end."""
    if isinstance(source, HostMemory) and isinstance(target, HostMemory):
        there, here = target.view[to : to + length], source.view[at : at + length]

        def copy() -> None:
            there[:] = here

        return copy
    import torch

    place, given = bytes_of(target)[to : to + length], bytes_of(source)[at : at + length]

    def copy_there() -> None:
        place.copy_(given)
        torch.cuda.synchronize(place.device)

    return copy_there
