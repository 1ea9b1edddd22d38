"""Key that signs what clients get and send back: encrypted reasoning, and the ids of a stream's events.

The key is read from a file or from a variable, or drawn at the start. If it is given, several routers, or a
restarted one, accept each other's signatures.
"""

from pathlib import Path
from typing import Final

from baton.bootstrap.settings import BootstrapSettings
from baton.runtime.errors import StartupError

BYTES_MIN: Final = 16
BYTES_MAX: Final = 64 * 2**10


def read_reasoning_key(settings: BootstrapSettings) -> bytes:
    """Return the key that the settings give, or no bytes if they give none. A file wins over the variable.
    Raises StartupError if the file cannot be read, or holds too little or too much."""
    file = settings.reasoning_key_file
    if not file:
        return settings.reasoning_key.encode()
    try:
        with Path(file).open("rb") as opened:
            key = opened.read(BYTES_MAX + 1).strip()
    except OSError as error:
        raise StartupError(f"--reasoning-key-file {file} cannot be read: {error.strerror}") from None
    if not BYTES_MIN <= len(key) <= BYTES_MAX:
        raise StartupError(f"--reasoning-key-file {file} has to hold {BYTES_MIN} to {BYTES_MAX} bytes")
    return key
