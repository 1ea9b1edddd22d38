"""Credential by which a worker's process proves to the router that it is the one that registered.

The leader's process draws a secret at its start and sends it with its registration. It sends it again with
each call for its incarnation. The worker's other ranks send a secret derived from it, which allows them to
add lines to timelines and nothing else.
"""

import hmac
import secrets
from typing import Final

from baton.ids import Incarnation

BYTES: Final = 32
BYTES_MIN: Final = 16
BYTES_MAX: Final = 64


def draw() -> bytes:
    """Draw the random credential of one worker process. It is never logged, shown or stored."""
    return secrets.token_bytes(BYTES)


def incarnation_of(credential: bytes) -> Incarnation:
    """Return the incarnation that belongs to a worker process's credential, derived from the credential.

    So no other process can register under that incarnation, even if the router has forgotten it.
    """
    digest = hmac.digest(credential, b"incarnation", "sha256")
    return Incarnation(int.from_bytes(digest[:8], "big") >> 1 | 1)


def of_ranks(credential: bytes) -> bytes:
    """Return the credential of the ranks other than the leader. The leader's credential cannot be derived
    from it."""
    return hmac.digest(credential, b"ranks", "sha256")
