"""How much memory can still be taken on a device?"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from baton.runtime.errors import StartupError, describe_error
from baton.runtime.logging import Log

log = Log(__name__)

MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")
RECLAIMABLE: Final = frozenset({"inactive_file", "active_file", "slab_reclaimable"})
"""Of a control group's memory.stat."""
PATIENCE_S: Final = 15.0
"""How long memory is waited for that a process which has just ended may be giving back."""
LOOK_S: Final = 0.5
"""Between two looks at it."""


@dataclass(frozen=True, slots=True)
class Available:
    """Memory that can still be allocated."""

    size: int
    """Bytes."""
    total: int
    """Bytes, taken ones as well."""
    where: str
    """Whose they are, for messages."""

    def __str__(self) -> str:
        return f"{self.size} are available {self.where}"


def memory_shortage(device: torch.device, needed: int) -> Available | None:
    """What is available on `device`, if it is less than `needed` bytes and stays so for PATIENCE_S, or there
    never are so many. None if it suffices, or the system does not tell. Blocks."""
    end = time.monotonic() + PATIENCE_S
    waits = False
    while (now := available(device)) is not None and now.size < needed:
        if now.total < needed or time.monotonic() >= end:
            return now
        if not waits:
            log.info("waiting for memory", device=str(device), needed=needed, available=now.size)
        waits = True
        time.sleep(LOOK_S)
    return None


@contextmanager
def enough(what: str) -> Iterator[None]:
    """Raises StartupError, in one line, where `what` is done within and its device has no memory for it:
    nobody reserves that of a GPU, and who shares it may have taken it since it was looked at."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"{what} takes more memory than is left on its device, which other processes may share: "
            f"{describe_error(error)}"
        ) from error


def available(device: torch.device) -> Available | None:
    """On `device` now; None if the system does not tell."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Available(int(free), int(total), "there")
    told = [each for each in (_machine(MEMINFO), _group(CGROUP)) if each is not None]
    return min(told, key=lambda each: each.size, default=None)


def _machine(meminfo: Path) -> Available | None:
    try:
        lines = meminfo.read_text("ascii").splitlines()
    except OSError:
        return None
    bytes_of = {words[0]: int(words[1]) * 1024 for words in map(str.split, lines) if len(words) > 1}
    try:
        return Available(bytes_of["MemAvailable:"], bytes_of["MemTotal:"], "on this machine")
    except KeyError:
        return None


def _group(cgroup: Path) -> Available | None:
    """What the container's limit leaves. File pages and the kernel's caches fill it in time, and go when
    memory is wanted: those in use (`active_file`) as well."""
    try:
        limit = (cgroup / "memory.max").read_text("ascii").strip()
        taken = (cgroup / "memory.current").read_text("ascii").strip()
        stat = (cgroup / "memory.stat").read_text("ascii").splitlines()
    except OSError:
        return None
    if not limit.isdecimal() or not taken.isdecimal():
        return None
    reclaimable = sum(int(size) for name, size in map(str.split, stat) if name in RECLAIMABLE)
    left = max(0, int(limit) - int(taken) + reclaimable)
    return Available(left, int(limit), f"under the container's limit of {limit}")
