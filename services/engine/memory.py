"""How much memory can still be taken on a device?"""

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on `device` now; None if the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    told = [size for size in (_machine(MEMINFO), _group(CGROUP)) if size is not None]
    return min(told) if told else None


def _machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text("ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "MemAvailable:":
            return int(words[1]) * 1024
    return None


def _group(cgroup: Path) -> int | None:
    """What the container's limit leaves, counting file pages that can be dropped."""
    try:
        limit = (cgroup / "memory.max").read_text("ascii").strip()
        taken = (cgroup / "memory.current").read_text("ascii").strip()
        cached = (cgroup / "memory.stat").read_text("ascii").splitlines()
    except OSError:
        return None
    if not limit.isdecimal() or not taken.isdecimal():
        return None
    reclaimable = sum(int(line.split()[1]) for line in cached if line.startswith("inactive_file "))
    return max(0, int(limit) - int(taken) + reclaimable)
