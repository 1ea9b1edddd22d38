"""Does a GPU read what the network wrote to its memory, once its worker was told of it?

What a network card writes into a GPU may still be on its way there when the seal, which is in the host's
memory, says that it has come. A device that does not see to the order by itself is asked to, before each look
at pages that others write.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from baton.engine.device import bind_thread
from baton.runtime.logging import Log

log = Log(__name__)

SUPPORTED: Final = 116
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: a network card can write to it at all."""
FLUSH_OPTIONS: Final = 117
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"""
BY_A_CALL: Final = 1
"""CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST"""
ORDERING: Final = 118
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING"""
OWNER: Final = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: for what runs on the device itself; the scope of a flush, too."""
THIS_CONTEXT: Final = 0
"""CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX"""


@dataclass(frozen=True, slots=True)
class DeviceWrites:
    """What a GPU says of writes that a network card makes to it."""

    supported: bool
    ordering: int
    """From OWNER on what runs on the device sees them in their order."""
    flushed_by_a_call: bool


def flush_for(device: torch.device, driver: Any = None) -> Callable[[], None] | None:
    """What has `device` see the writes that have been reported so far, and raises RuntimeError where that
    fails; None where nothing is to be done. `driver`: CUDA's, which is looked for if none is given."""
    if device.type != "cuda":
        return None
    driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
    writes = writes_to(device, driver)
    if not writes.supported or writes.ordering >= OWNER:
        return None
    if not writes.flushed_by_a_call:
        log.warning(
            "what a network card writes to this GPU may come later than is said: have pages checked",
            device=str(device),
            setting="--kv-checksum pages",
        )
        return None

    def flush() -> None:
        bind_thread(str(device))
        _succeed(driver.cuFlushGPUDirectRDMAWrites(THIS_CONTEXT, OWNER))

    return flush


def writes_to(device: torch.device, driver: Any) -> DeviceWrites:
    """Of a GPU, by CUDA's `driver`. Raises RuntimeError where it does not say."""
    bind_thread(str(device))
    number = ctypes.c_int()
    _succeed(driver.cuDeviceGet(ctypes.byref(number), device.index))

    def told(attribute: int) -> int:
        value = ctypes.c_int()
        _succeed(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, number))
        return value.value

    return DeviceWrites(bool(told(SUPPORTED)), told(ORDERING), bool(told(FLUSH_OPTIONS) & BY_A_CALL))


def _succeed(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver refuses to say or do how remote writes are ordered: error {code}")
