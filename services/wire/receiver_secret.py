"""How does a decode worker prove to a prefill worker that it is the one that a room named?

Each incarnation draws a secret and shows it to prefill workers alone. Everybody else, the bootstrap and
whoever opens rooms included, has the secret's digest: with that a prefill worker can check what it is shown,
and nobody can show it.
"""

import hashlib
import secrets
from typing import Final

SECRET_BYTES: Final = 16
DIGEST_BYTES: Final = 32


def draw_secret() -> bytes:
    """Of one incarnation."""
    return secrets.token_bytes(SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    """What a worker registers, and a room names."""
    return hashlib.sha256(secret).digest()


def matches_secret(shown: bytes, digest: bytes) -> bool:
    """Compared in constant time."""
    return secrets.compare_digest(digest_of(shown), digest)
