"""On which device does this rank compute?"""

import torch

from services.runtime.errors import StartupError

AUTO = "auto"


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
