"""Ending a child process with its parent, and adoption of orphaned processes (Linux).

    python -m baton.runtime.parent_watch PARENT_PID COMMAND [ARGUMENT …]

The command asks the kernel to kill this process when its parent ends, and then becomes COMMAND.
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
    """Make the kernel kill this process when its parent process ends. Raises OSError.

    `parent`: the parent's process id. If it is no longer the parent, this process exits.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Context manager in which orphaned descendants of this process become its children. Raises OSError."""
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
