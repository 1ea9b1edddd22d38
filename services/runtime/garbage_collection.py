"""Settings of Python's garbage collector for a service that has started.

The collector then looks only at newer objects. Hundreds of thousands of objects that the start loaded live as
long as the process. To look through them again and again takes a tenth of a busy process's time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from baton.runtime.memory_trimming import trim_memory

NEW_OBJECTS: Final = 10_000
"""New objects between two collections of the youngest generation. A request makes far fewer, and frees them
at its end without a collection.
"""
LOOKS: Final = 10
"""Collections of a generation before one of the next older generation."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Context of imports, without collections. Nearly all objects of imports stay, and collections would take
    a fifth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_loaded_objects() -> None:
    """Exempt all present objects from collections. Called once, when everything that stays is loaded."""
    gc.collect()
    trim_memory()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, LOOKS, LOOKS)
