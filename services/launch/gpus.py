"""Which GPUs does each worker of a stack on one machine get?

Found out without the tensor library, which takes seconds to load and memory on each GPU that it looks at.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
NONE: Final = "-1"
"""Where CUDA stops reading that list."""
DRIVER: Final = Path("/proc/driver/nvidia/gpus")
"""A directory for each GPU, where the driver is loaded."""
ASK_TIMEOUT_S: Final = 20.0

Gpus = tuple[str, ...]
"""As CUDA_VISIBLE_DEVICES names them: numbers, or a GPU's own name."""


def find_gpus(environ: Mapping[str, str], count: Callable[[], int] | None = None) -> Gpus:
    """Those that this process may use: what CUDA_VISIBLE_DEVICES says, or else all of the machine."""
    if VISIBLE not in environ:
        return tuple(map(str, range((count or count_gpus)())))
    found: dict[str, None] = {}
    for each in environ[VISIBLE].split(","):
        if each.strip() in ("", NONE):
            break
        found[each.strip()] = None
    return tuple(found)


def count_gpus(command: str = "nvidia-smi", driver: Path = DRIVER) -> int:
    """How many NVIDIA GPUs this machine has; 0 also where nobody can say."""
    program = shutil.which(command)
    if program is not None:
        try:
            told = subprocess.run(  # noqa: S603
                [program, "-L"], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            pass
        else:
            return sum(line.startswith("GPU ") for line in told.stdout.splitlines())
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def deal_gpus(gpus: Sequence[str], ranks: Sequence[int]) -> list[Gpus]:
    """For each worker as many of `gpus` as it has `ranks`, neighbours, each given to one worker before any is
    given to two. One with more ranks than there are GPUs gets all of them, for its ranks to take in turn."""
    shares: list[Gpus] = []
    first = 0
    for wanted in ranks:
        size = min(wanted, len(gpus))
        shares.append(tuple(gpus[(first + place) % len(gpus)] for place in range(size)))
        first += wanted
    return shares
