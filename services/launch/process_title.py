"""What does `ps` show of a process that was forked, and is to be another command than its parent?

The kernel shows the bytes that it laid down when the program was started. It can be told of others (Linux, in
a kernel that can restore processes); where it cannot, `ps` shows the parent's command.
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
"""Where proc_pid_stat(5) tells what the kernel is told again, counted from 1."""
NAME_ENDS: Final = 2
"""Fields up to the name, which is in brackets and may hold anything."""


class _Map(ctypes.Structure):
    """`struct prctl_mm_map`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack", "arg_start", "arg_end")),
        *((name, ctypes.c_uint64) for name in ("env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


_shown: list[ctypes.Array[ctypes.c_char]] = []
"""The kernel reads it as long as the process lives."""


def set_process_title(words: Sequence[str]) -> None:
    """Have `ps` and /proc show `words` as this process's command, where the kernel lets it."""
    text = ctypes.create_string_buffer("\0".join(words).encode(errors="surrogateescape"))
    with suppress(OSError, AttributeError):
        told = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        places = {name: int(told[field - NAME_ENDS - 1]) for name, field in STAT.items()}
        begin = ctypes.addressof(text)
        places |= {"arg_start": begin, "arg_end": begin + ctypes.sizeof(text)}
        libc = ctypes.CDLL(None, use_errno=True)
        libc.sbrk.restype = ctypes.c_uint64
        wanted = _Map(**places, brk=libc.sbrk(0), exe_fd=2**32 - 1)
        _shown.append(text)
        libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(wanted), ctypes.sizeof(wanted), 0)
