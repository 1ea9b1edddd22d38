"""Measurement of the memory that can still be allocated on a device."""

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
"""Fields of a control group's memory.stat that count memory which the kernel frees when it is needed."""
PATIENCE_S: Final = 15.0
"""Longest wait in seconds for memory that a process which has just ended may still be freeing."""
LOOK_S: Final = 0.5
"""Interval in seconds between checks while waiting for memory."""


@dataclass(frozen=True, slots=True)
class Available:
    """Memory of one device or control group that can still be allocated."""

    size: int
    """Bytes of the memory that can still be allocated."""
    total: int
    """Size of the whole memory in bytes, allocated parts included."""
    where: str
    """Location of the memory for messages, such as "on this machine"."""

    def __str__(self) -> str:
        return f"{self.size} are available {self.where}"


def memory_shortage(device: torch.device, needed: int) -> Available | None:
    """Return the available memory of `device` if it is less than `needed` bytes, else None. Blocks.

    Waits up to PATIENCE_S for memory to be freed, if the device has that much in total. Also None if the
    system does not report memory.
    """
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
def memory_errors_as_startup_errors(what: str) -> Iterator[None]:
    """Turn exhaustion of the device's memory in the context into a StartupError with one line of text.

    `what`: subject of that line, such as the model. GPU memory cannot be reserved: another process may have
    taken it since it was checked.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"{what} takes more memory than is left on its device, which other processes may share: "
            f"{describe_error(error)}"
        ) from error


def available(device: torch.device) -> Available | None:
    """Return the memory of `device` that can still be allocated, or None if the system does not report it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Available(int(free), int(total), "there")
    known = [each for each in (_machine(MEMINFO), _group(CGROUP)) if each is not None]
    return min(known, key=lambda each: each.size, default=None)


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
    """Return the memory that the limit of the control group `cgroup` leaves, or None without a limit.

    File pages and kernel caches count as available, even those in use (`active_file`), since they are freed
    on demand.
    """
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
