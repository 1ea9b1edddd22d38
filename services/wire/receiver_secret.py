"""Secret by which a decode worker proves to a prefill worker that it is the one that a room named.

Each incarnation draws a secret, and shows it to prefill workers only. All others, the router and openers of
rooms included, have its digest. A prefill worker checks the secret by the digest. The secret cannot be
derived from it.
"""

import hashlib
import secrets
from typing import Final

SECRET_BYTES: Final = 16
DIGEST_BYTES: Final = 32


def draw_secret() -> bytes:
    """Draw the secret of one incarnation."""
    return secrets.token_bytes(SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    """Return the digest that a worker registers, and that a room names."""
    return hashlib.sha256(secret).digest()


def matches_secret(shown: bytes, digest: bytes) -> bool:
    """Return whether a secret has this digest, compared in constant time."""
    return secrets.compare_digest(digest_of(shown), digest)
