"""Tuning of Python's garbage collector for a service that has started.

After that the collector scans only newer objects. Hundreds of thousands of objects from the start live as
long as the process. Scanning them again and again takes a tenth of a busy process's time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from baton.runtime.memory_trimming import trim_memory

NEW_OBJECTS: Final = 10_000
"""Number of new objects after which Python collects the youngest generation. A request makes far fewer, and
frees them at its end without a collection."""
LOOKS: Final = 10
"""Number of collections of one of Python's generations after which the next older generation is collected."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Context manager that turns off garbage collection while modules are imported.

    Nearly all objects made by imports stay, and collections would take a fifth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_loaded_objects() -> None:
    """Exempt all present objects from garbage collection. Called once, when everything that stays
    is loaded."""
    gc.collect()
    trim_memory()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, LOOKS, LOOKS)
