"""Ordering of a network card's writes to GPU memory.

Data that a network card writes to a GPU may still be under way when the seal in host memory says it has
arrived. A device that does not order such writes itself is flushed before pages are read that others write.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from baton.inference.device import bind_thread
from baton.runtime.logging import Log

log = Log(__name__)

SUPPORTED: Final = 116
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: a network card can write to the device."""
FLUSH_OPTIONS: Final = 117
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"""
BY_A_CALL: Final = 1
"""CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST"""
ORDERING: Final = 118
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING"""
OWNER: Final = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: ordered for work on the device itself. Also the scope of a
flush."""
THIS_CONTEXT: Final = 0
"""CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX"""


@dataclass(frozen=True, slots=True)
class DeviceWrites:
    """A GPU's properties for writes by a network card."""

    supported: bool
    ordering: int
    """From OWNER on, work on the device sees writes in their order."""
    flushed_by_a_call: bool


def flush_for(device: torch.device, driver: Any = None) -> Callable[[], None] | None:
    """Return a function that makes `device` see the writes that were reported so far. None if none is needed.

    The function raises RuntimeError if it fails. `driver`: CUDA's driver library, found if not given.
    """
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
    """Return the properties of a GPU by CUDA's `driver`. Raises RuntimeError if it does not know them."""
    bind_thread(str(device))
    number = ctypes.c_int()
    _succeed(driver.cuDeviceGet(ctypes.byref(number), device.index))

    def attribute_value(attribute: int) -> int:
        value = ctypes.c_int()
        _succeed(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, number))
        return value.value

    return DeviceWrites(
        bool(attribute_value(SUPPORTED)),
        attribute_value(ORDERING),
        bool(attribute_value(FLUSH_OPTIONS) & BY_A_CALL),
    )


def _succeed(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver refuses to say or do how remote writes are ordered: error {code}")
