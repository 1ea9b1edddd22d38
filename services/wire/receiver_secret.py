"""Secret by which a decode worker proves to a prefill worker that it is the one a room names.

Each incarnation of a decode worker draws a secret and shows it to prefill workers only. All other processes,
such as the router, have only the digest, from which the secret cannot be derived. A prefill worker checks the
secret against the digest that came with the room.
"""

import hashlib
import secrets
from typing import Final

SECRET_BYTES: Final = 16
DIGEST_BYTES: Final = 32


def draw_secret() -> bytes:
    """Draw the random secret of one incarnation of a decode worker."""
    return secrets.token_bytes(SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    """Return the digest of a secret, which a worker registers and a room carries."""
    return hashlib.sha256(secret).digest()


def matches_secret(shown: bytes, digest: bytes) -> bool:
    """Return whether the secret `shown` has this digest. The comparison takes constant time."""
    return secrets.compare_digest(digest_of(shown), digest)
