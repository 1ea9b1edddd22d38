"""Does the system get back what a large piece of work has freed?

The C library keeps it for the next one, in a heap of each thread, and a process that once did something large
stays large.
"""

import ctypes
from collections.abc import Callable
from functools import cache


@cache
def _trim() -> Callable[[int], int] | None:
    """None: a C library that has no such call."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


def give_back() -> None:
    """Milliseconds for gigabytes. For a thread of its own: the interpreter goes on meanwhile."""
    trim = _trim()
    if trim is not None:
        trim(0)
