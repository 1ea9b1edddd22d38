"""Which cores does this process run on, and with how many compute threads?"""

import os

from baton.runtime.errors import StartupError


def allowed_cpus() -> tuple[int, ...]:
    """The cores that this process may use now, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def pin(cpus: tuple[int, ...], threads: int) -> int:
    """Keep this process on `cpus` (none: where it is) and set its number of compute threads.

    `threads` 0 takes OMP_NUM_THREADS if that is set to a number, else one thread a core. To be called
    before the tensor library is imported, which reads both once. Returns the number of threads.
    Raises StartupError if a core is not there for this process.
    """
    if cpus:
        missing = sorted(set(cpus) - set(allowed_cpus()))
        if missing:
            raise StartupError(
                f"--cpus names core {missing[0]}, but this process may use {_list(allowed_cpus())}"
            )
        os.sched_setaffinity(0, cpus)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    count = threads or (int(asked) if asked.isdecimal() and int(asked) > 0 else len(allowed_cpus()))
    os.environ["OMP_NUM_THREADS"] = str(count)
    return count


def _list(cpus: tuple[int, ...]) -> str:
    return "core " + ", ".join(map(str, cpus))
