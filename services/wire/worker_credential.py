"""Credential by which a worker's process proves that it is the one that registered.

The process draws a secret when it begins, sends it with its registration, and shows it whenever it acts for
its incarnation. Its other ranks show one that is derived from it. That one adds lines to timelines, and
allows nothing else.
"""

import hmac
import secrets
from typing import Final

from baton.ids import Incarnation

BYTES: Final = 32
BYTES_MIN: Final = 16
BYTES_MAX: Final = 64


def draw() -> bytes:
    """Draw the credential of one process. It is never logged, shown or stored."""
    return secrets.token_bytes(BYTES)


def incarnation_of(credential: bytes) -> Incarnation:
    """Return the incarnation of the process that drew a credential.

    It is derived from the credential. So no other process can register with it, whatever a router has
    forgotten.
    """
    digest = hmac.digest(credential, b"incarnation", "sha256")
    return Incarnation(int.from_bytes(digest[:8], "big") >> 1 | 1)


def of_ranks(credential: bytes) -> bytes:
    """Return the credential of the ranks that follow a worker's leader. The leader's cannot be derived from
    it."""
    return hmac.digest(credential, b"ranks", "sha256")
