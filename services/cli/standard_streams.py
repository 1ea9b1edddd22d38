"""Replacement of missing standard streams (stdin, stdout, stderr) by the null device.

Otherwise the first files that the process opens would get their numbers. A library's output would then go
into another's connection, and the event loop could start no process from such a file.
"""

import os
import sys
from typing import Final

STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""Names and modes of the standard streams, in the order of their file numbers 0, 1 and 2."""


def open_missing() -> None:
    """Open the null device for each standard stream that is missing. Child processes inherit it.

    Call it before any file is opened. Raises OSError if there is no null device.
    """
    for number, (name, mode) in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
            stream = os.fdopen(number, mode, encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
