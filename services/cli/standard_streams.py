"""What are a process's input, output and errors, where whoever started it gave it none?

The null device. Else the first files that it opens have their numbers: what a library writes to a standard
stream goes into another's connection, and the event loop starts no process from such a file.
"""

import os
import sys
from typing import Final

STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""By their numbers: 0, 1, 2."""


def open_missing() -> None:
    """Open the null device for each that is missing; those that it starts inherit it. Before anything else
    opens a file. Raises OSError where there is no null device."""
    for number, (name, mode) in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has the lowest number that is free
            stream = os.fdopen(number, mode, encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
