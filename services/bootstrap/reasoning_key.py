"""Key that signs the encrypted reasoning that clients get and send back.

The key is drawn at the start, or read from a file. With the file, several routers, or a restarted one, accept
each other's signatures.
"""

from pathlib import Path
from typing import Final

from baton.runtime.errors import StartupError

BYTES_MIN: Final = 16
BYTES_MAX: Final = 64 * 2**10


def read_reasoning_key(file: str) -> bytes:
    """Return the key in `file`, or no bytes if no file is given. Raises StartupError if the file cannot be
    read, or holds too little or too much."""
    if not file:
        return b""
    try:
        with Path(file).open("rb") as opened:
            key = opened.read(BYTES_MAX + 1).strip()
    except OSError as error:
        raise StartupError(f"--reasoning-key-file {file} cannot be read: {error.strerror}") from None
    if not BYTES_MIN <= len(key) <= BYTES_MAX:
        raise StartupError(f"--reasoning-key-file {file} has to hold {BYTES_MIN} to {BYTES_MAX} bytes")
    return key
