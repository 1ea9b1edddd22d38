"""Values that are drawn at random for one request: its seeds, and the ids in its answer.

All of them are derived from one root. So a router that knows the root draws the same values again, when it
continues a stream that another router began.

No clock or threads.
"""

import secrets
from hashlib import blake2b
from typing import Final

ROOT_BYTES: Final = 32
NONCE_BYTES: Final = 8
"""Length in bytes of the random part of a root. The rest of a root is the request id and the routers' key."""
SEED_BYTES: Final = 8
ID_BYTES: Final = 16


class DrawnValues:
    """Source of the values that are drawn for one request."""

    __slots__ = ("_root",)

    def __init__(self, root: bytes) -> None:
        """Derive all values from `root`, at most 64 bytes that cannot be guessed."""
        self._root = root

    def seed(self, prompt: int) -> int:
        """Return the seed, of 64 bits, of the prompt at index `prompt`."""
        return int.from_bytes(self._derive(b"seed %d" % prompt, SEED_BYTES), "big")

    def call_digits(self, choice: int, call: int) -> str:
        """Return 32 hexadecimal digits for the id of a tool call. `choice`: index of the choice. `call`:
        index of the tool call in the choice."""
        return self._derive(b"call %d %d" % (choice, call), ID_BYTES).hex()

    def response_digits(self) -> str:
        """Return 32 hexadecimal digits for the ids of a response and of its items."""
        return self._derive(b"response", ID_BYTES).hex()

    def _derive(self, name: bytes, size: int) -> bytes:
        return blake2b(name, key=self._root, digest_size=size).digest()


def random_values() -> DrawnValues:
    """Return values that cannot be drawn again."""
    return DrawnValues(secrets.token_bytes(ROOT_BYTES))


def derive_root(key: bytes, request_id: str, nonce: bytes) -> bytes:
    """Return the root of one request's values. `key`: key that all routers of a stack share, 32 bytes.
    `nonce`: NONCE_BYTES that were drawn for the request."""
    return blake2b(nonce + request_id.encode(), key=key, digest_size=ROOT_BYTES).digest()
