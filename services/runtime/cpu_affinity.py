"""CPU cores that this process may use, and its number of compute threads."""

import os

from baton.runtime.errors import StartupError


def allowed_cpus() -> tuple[int, ...]:
    """Return the CPU cores that this process may use now, by number, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def pin(cpus: tuple[int, ...], threads: int) -> int:
    """Restrict this process to the cores `cpus`, if any are given, and set and return its number of compute
    threads.

    If `threads` is 0, the number is OMP_NUM_THREADS if that is a number, else one thread per core. Call it
    before the tensor library is imported, which reads both once. Raises StartupError for a core that this
    process may not use.
    """
    if cpus:
        missing = sorted(set(cpus) - set(allowed_cpus()))
        if missing:
            raise StartupError(
                f"--cpus names core {missing[0]}, but this process may use {_list(allowed_cpus())}"
            )
        os.sched_setaffinity(0, cpus)
    given = os.environ.get("OMP_NUM_THREADS", "")
    count = threads or (int(given) if given.isdecimal() and int(given) > 0 else len(allowed_cpus()))
    os.environ["OMP_NUM_THREADS"] = str(count)
    return count


def _list(cpus: tuple[int, ...]) -> str:
    return "core " + ", ".join(map(str, cpus))
