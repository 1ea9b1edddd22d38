"""Memory that is freed and goes back to the system.

The C library keeps what is freed for the next allocation, in a heap of each thread. A process that once did
something large stays large.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

INTERVAL_S: Final = 0.25
"""Time between two returns within a stage: what is reused at once stays, what adds up does not."""


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


@contextmanager
def trimming_memory() -> Iterator[None]:
    """A stage of large work, such as loading a model. What is freed within it goes back to the system every
    INTERVAL_S, so that its peak is low, and at its end. Mapping each large block by itself instead
    (`mallopt`) makes work on strips of weights two to three times slower."""
    ended = threading.Event()
    thread = threading.Thread(target=_give_back_until, args=(ended,), name="returning memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        gc.collect()
        give_back()


def _give_back_until(ended: threading.Event) -> None:
    while not ended.wait(INTERVAL_S):
        give_back()
