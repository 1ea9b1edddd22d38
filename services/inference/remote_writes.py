"""Ordering of a network card's writes to GPU memory (GPUDirect RDMA).

The seal in host memory marks a hand-over as complete. When it arrives, pages that a network card writes to a
GPU may still be under way. A GPU that does not order such writes itself is flushed before it reads these
pages.
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
"""CUDA device attribute by which a GPU says whether a network card can write to it.

CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
"""
FLUSH_OPTIONS: Final = 117
"""CUDA device attribute with the ways in which a network card's writes to the GPU can be flushed.

CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
"""
BY_A_CALL: Final = 1
"""Bit of FLUSH_OPTIONS: the driver has a call that flushes a network card's writes.

CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
"""
ORDERING: Final = 118
"""CUDA device attribute by which a GPU says how far it orders a network card's writes itself.

CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
"""
OWNER: Final = 100
"""Value of ORDERING: writes are ordered for work on the GPU itself. It is also the scope of a flush.

CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
"""
THIS_CONTEXT: Final = 0
"""Target of a flush call: the calling thread's CUDA context.

CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
"""


@dataclass(frozen=True, slots=True)
class DeviceWrites:
    """A GPU's properties that concern writes by a network card to its memory."""

    supported: bool
    ordering: int
    """How far the GPU itself orders a network card's writes, as a value of the CUDA attribute ORDERING. From
    OWNER on, work on the GPU reads these writes in order."""
    flushed_by_a_call: bool


def flush_for(device: torch.device, driver: Any = None) -> Callable[[], None] | None:
    """Return a function that makes all completed remote writes visible to `device`, or None if it needs none.

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
    """Return a GPU's properties that concern remote writes, read from CUDA's `driver`.

    Raises RuntimeError if the driver does not know them.
    """
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
