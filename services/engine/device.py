"""On which device does this rank compute, and in which numbers?"""

from typing import Final

import torch

from baton.engine.ranks.collectives import Team
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log

log = Log(__name__)

AUTO: Final = "auto"
BFLOAT16_OF_CPUS: Final = ("avx512_bf16", "amx_bf16", "bf16")
"""Instructions that multiply it, one of which the CPU has to have: those of x86, and ARM's."""
BFLOAT16_OF_GPUS: Final = (8, 0)
"""The compute capability from which on a GPU multiplies it."""


class DeviceNotFound(StartupError):
    """`--device` names what this machine, or this build of the tensor library, does not have."""


def find_device(device: str, rank: int = 0) -> torch.device:
    """`device` with its number; auto is CUDA if there is one. Where no number is said, the ranks of a worker
    take the machine's devices in turn. Raises DeviceNotFound."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == AUTO:
        device = "cuda" if there else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise DeviceNotFound(f"--device {device}: give auto, cpu or cuda[:N]") from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise DeviceNotFound(f"--device {device}: give auto, cpu or cuda[:N]")
    if not there:
        raise DeviceNotFound(f"--device {device}: this machine has no CUDA device that PyTorch can use")
    number = rank % there if place.index is None else place.index
    if number >= there:
        raise DeviceNotFound(f"--device {device}: this machine has {there} CUDA devices, cuda:0 the first")
    return torch.device("cuda", number)


def bind_thread(device: str) -> None:
    """Have what this thread asks of CUDA from now on concern `device`: "cuda:N"; "cpu" asks nothing.

    A thread has no context of its own at first, and that of the one that loaded the model is not its. Without
    one the transfer library finds no way between two GPUs, and may refuse their memory. A thread begins with
    the number 0, to which torch then sets nothing: only a call that needs a context brings it. Waits for what
    the device has been asked."""
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
        torch.cuda.synchronize(place)


def find_dtype(dtype: str, device: torch.device, team: Team) -> str:
    """`dtype`, the same on all ranks; auto is bfloat16 where every rank's `device` has instructions for it.
    Where it has none, and steps are not compiled, a prompt takes several times as long in bfloat16 as in
    float32."""
    if dtype != AUTO:
        return dtype
    if device.type == "cuda":
        multiplies = torch.cuda.get_device_capability(device) >= BFLOAT16_OF_GPUS
    else:
        told = torch.cpu.get_capabilities()
        multiplies = any(told.get(name) for name in BFLOAT16_OF_CPUS)
    if team.least(multiplies):
        return "bfloat16"
    where = f"{device} of another rank" if multiplies else str(device)
    log.info("float32 is chosen: there are no instructions for bfloat16", device=where)
    return "float32"
