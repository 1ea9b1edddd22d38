"""Discovery of the machine's GPUs, and their division among the workers of a stack.

The tensor library is not used. It takes seconds to load, and uses memory on each GPU that it looks at.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
NONE: Final = "-1"
"""Entry of CUDA_VISIBLE_DEVICES after which CUDA ignores the rest of the list."""
DRIVER: Final = Path("/proc/driver/nvidia/gpus")
"""Folder of the NVIDIA driver in /proc that has one folder per GPU. It is missing if the driver is not
loaded."""
QUERY_TIMEOUT_S: Final = 20.0

Gpus = tuple[str, ...]
"""GPUs by number or UUID, as in CUDA_VISIBLE_DEVICES."""


def find_gpus(environ: Mapping[str, str], count: Callable[[], int] | None = None) -> Gpus:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all of the machine."""
    if VISIBLE not in environ:
        return tuple(map(str, range((count or count_gpus)())))
    found: dict[str, None] = {}
    for each in environ[VISIBLE].split(","):
        if each.strip() in ("", NONE):
            break
        found[each.strip()] = None
    return tuple(found)


def count_gpus(command: str = "nvidia-smi", driver: Path = DRIVER) -> int:
    """Return the number of NVIDIA GPUs of this machine, or 0 if it cannot be found out."""
    program = shutil.which(command)
    if program is not None:
        try:
            listing = subprocess.run(  # noqa: S603
                [program, "-L"], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            pass
        else:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def deal_gpus(gpus: Sequence[str], ranks: Sequence[int]) -> list[Gpus]:
    """Return adjacent GPUs for each worker, as many as the worker's number in `ranks`.

    Each GPU goes to one worker before any goes to two. A worker with more ranks than there are GPUs gets all
    of them, and its ranks take them in turn.
    """
    shares: list[Gpus] = []
    first = 0
    for wanted in ranks:
        size = min(wanted, len(gpus))
        shares.append(tuple(gpus[(first + offset) % len(gpus)] for offset in range(size)))
        first += wanted
    return shares
