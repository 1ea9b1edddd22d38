"""How does a child die with whoever started it, even when that was killed? And who is an orphan's parent?

    python -m baton.runtime.parent_watch PARENT_PID COMMAND [ARGUMENT …]

Asks the kernel to kill this process when its parent ends (Linux), then becomes the command.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36


def die_with_parent(parent: int) -> None:
    """Be killed when `parent`, whose child this process is, ends. Raises OSError."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


@contextmanager
def adopting() -> Iterator[None]:
    """Within, this process becomes the parent of those below it whose own parent ends. Raises OSError."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606
