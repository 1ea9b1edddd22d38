"""What does Python's garbage collector look through, in a service that has started?

Only what came since. What was loaded for the start, hundreds of thousands of objects, stays as long as the
process; looked through again and again it takes a tenth of a busy process's time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from baton.runtime.memory_trimming import give_back

NEW_OBJECTS: Final = 10_000
"""Between two looks at the newest: far more than one request makes, whose end frees them without a look."""
LOOKS: Final = 10
"""At the newest before one at those that were there the last time, and so on."""


@contextmanager
def importing() -> Iterator[None]:
    """Within, it looks through nothing: of what imports make nearly all stays, and the looks at it take a
    fifth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_loaded_objects() -> None:
    """Once, when everything that stays is there."""
    gc.collect()
    give_back()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, LOOKS, LOOKS)
