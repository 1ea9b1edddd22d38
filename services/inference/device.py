"""Choice of the device on which a rank computes, and of its number format."""

from typing import Final

import torch

from baton.inference.collectives import Collectives
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log

log = Log(__name__)

AUTO: Final = "auto"
BFLOAT16_OF_CPUS: Final = ("avx512_bf16", "amx_bf16", "bf16")
"""Names of the x86 and ARM instruction sets that multiply bfloat16. A CPU needs one of them to use
bfloat16."""
BFLOAT16_OF_GPUS: Final = (8, 0)
"""Least CUDA compute capability of a GPU that multiplies bfloat16."""


class DeviceNotFound(StartupError):
    """The setting `--device` names a device that this machine or this build of torch does not have."""


def find_device(device: str, rank: int = 0) -> torch.device:
    """Return the torch device for the setting `device`, with its number. Raises DeviceNotFound.

    "auto" is CUDA if there is a GPU, else the CPU. Without a number, the ranks of a worker take the machine's
    GPUs in turn.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == AUTO:
        device = "cuda" if there else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise DeviceNotFound(f"--device {device}: give auto, cpu or cuda[:N]") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise DeviceNotFound(f"--device {device}: give auto, cpu or cuda[:N]")
    if not there:
        raise DeviceNotFound(f"--device {device}: this machine has no CUDA device that PyTorch can use")
    number = rank % there if found.index is None else found.index
    if number >= there:
        raise DeviceNotFound(f"--device {device}: this machine has {there} CUDA devices, cuda:0 the first")
    return torch.device("cuda", number)


def bind_thread(device: str) -> None:
    """Select `device` ("cuda:N") for the CUDA calls of the calling thread, and wait until the device is idle.

    Does nothing for "cpu". A new thread has no CUDA context, even if another thread loaded the model. Without
    one the transfer library finds no path between two GPUs, and may refuse their memory. Setting device 0, a
    thread's default, makes no context: only a call that needs one does.
    """
    found = torch.device(device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
        torch.cuda.synchronize(found)


def find_dtype(dtype: str, device: torch.device, rank_group: Collectives) -> str:
    """Return the number format for the setting `dtype`, the same on all ranks.

    "auto" is bfloat16 if every rank's `device` has instructions for it, else float32. Without them, and
    without compiled steps, a prompt takes several times as long in bfloat16 as in float32.
    """
    if dtype != AUTO:
        return dtype
    if device.type == "cuda":
        multiplies = torch.cuda.get_device_capability(device) >= BFLOAT16_OF_GPUS
    else:
        capabilities = torch.cpu.get_capabilities()
        multiplies = any(capabilities.get(name) for name in BFLOAT16_OF_CPUS)
    if rank_group.minimum(multiplies):
        return "bfloat16"
    where = f"{device} of another rank" if multiplies else str(device)
    log.info("float32 is chosen: there are no instructions for bfloat16", device=where)
    return "float32"
