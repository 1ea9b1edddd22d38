"""Change of the command line that `ps` shows for a forked process.

The kernel shows the bytes that it stored when the program was started. Linux lets a process replace them, if
the kernel is built with checkpoint and restore. Otherwise `ps` shows the parent's command line.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

PR_SET_MM: Final = 35
PR_SET_MM_MAP: Final = 14
STAT: Final = {
    "start_code": 26,
    "end_code": 27,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "start_stack": 28,
    "arg_start": 48,
    "arg_end": 49,
    "env_start": 50,
    "env_end": 51,
}
"""Field numbers in proc_pid_stat(5), counted from 1, of the values that the prctl call has to repeat, by the
value's name."""
NAME_FIELDS: Final = 2
"""Number of fields of proc_pid_stat(5) up to the program's name, which needs care because it may contain any
character."""


class _MemoryMap(ctypes.Structure):
    """Structure `prctl_mm_map` of the Linux kernel."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack", "arg_start", "arg_end")),
        *((name, ctypes.c_uint64) for name in ("env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


_titles: list[ctypes.Array[ctypes.c_char]] = []
"""Command lines that were set. The kernel reads them from this memory as long as the process lives."""


def set_process_title(words: Sequence[str]) -> None:
    """Make `ps` and /proc show `words` as this process's command line, if the kernel allows it."""
    text = ctypes.create_string_buffer("\0".join(words).encode(errors="surrogateescape"))
    with suppress(OSError, AttributeError):
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        addresses = {name: int(stat[field - NAME_FIELDS - 1]) for name, field in STAT.items()}
        begin = ctypes.addressof(text)
        addresses |= {"arg_start": begin, "arg_end": begin + ctypes.sizeof(text)}
        libc = ctypes.CDLL(None, use_errno=True)
        libc.sbrk.restype = ctypes.c_uint64
        memory_map = _MemoryMap(**addresses, brk=libc.sbrk(0), exe_fd=2**32 - 1)
        _titles.append(text)
        libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(memory_map), ctypes.sizeof(memory_map), 0)
