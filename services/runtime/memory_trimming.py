"""Return of freed memory from the C library's heap to the operating system.

The C library reserves freed memory for later allocations, in a heap of each thread. So a process that once
did large work stays large.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

INTERVAL_S: Final = 0.25
"""Seconds between two returns of freed memory in `trimming_memory`. Memory that is reused at once stays."""


@cache
def _trim() -> Callable[[int], int] | None:
    """Return the C library's `malloc_trim`, or None if it has none."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


def trim_memory() -> None:
    """Return freed memory to the operating system.

    It takes milliseconds for gigabytes, and other threads run meanwhile.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@contextmanager
def trimming_memory() -> Iterator[None]:
    """Context manager for work that needs much memory, such as loading a model.

    Freed memory returns to the system every INTERVAL_S and at the end, so that the peak stays low. The
    alternative, to map each large block by itself (`mallopt`), makes work on slices of weights two to three
    times slower.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_give_back_until, args=(ended,), name="returning memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        gc.collect()
        trim_memory()


def _give_back_until(ended: threading.Event) -> None:
    while not ended.wait(INTERVAL_S):
        trim_memory()
