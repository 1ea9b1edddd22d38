"""Which key signs the thoughts that clients carry?

One that is drawn at the start, or a file's, so that several bootstraps, and one that is started again, take
what each other signed.
"""

from pathlib import Path
from typing import Final

from baton.runtime.errors import StartupError

BYTES_MIN: Final = 16
BYTES_MAX: Final = 64 * 2**10


def read_reasoning_key(file: str) -> bytes:
    """The key in `file`; empty where none is named. Raises StartupError."""
    if not file:
        return b""
    try:
        with Path(file).open("rb") as opened:
            key = opened.read(BYTES_MAX + 1).strip()
    except OSError as error:
        raise StartupError(f"--thoughts-key-file {file} cannot be read: {error.strerror}") from None
    if not BYTES_MIN <= len(key) <= BYTES_MAX:
        raise StartupError(f"--thoughts-key-file {file} has to hold {BYTES_MIN} to {BYTES_MAX} bytes")
    return key
