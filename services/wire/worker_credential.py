"""By what does a worker's process prove that it is the one that registered?

It draws a secret when it begins, tells it with its registration, and shows it whenever it speaks for its
incarnation. Its other ranks show one that is made of it, which adds lines to timelines and does nothing else.
"""

import hmac
import secrets
from typing import Final

from baton.ids import Incarnation

BYTES: Final = 32
BYTES_MIN: Final = 16
BYTES_MAX: Final = 64


def draw() -> bytes:
    """Of one process. It is never logged, shown or written down."""
    return secrets.token_bytes(BYTES)


def incarnation_of(credential: bytes) -> Incarnation:
    """The incarnation of the process that drew this credential.

    It follows from the credential: nobody else can register by it, whatever a bootstrap has forgotten.
    """
    digest = hmac.digest(credential, b"incarnation", "sha256")
    return Incarnation(int.from_bytes(digest[:8], "big") >> 1 | 1)


def of_ranks(credential: bytes) -> bytes:
    """What the ranks of a worker show that do not lead it. It does not tell the leader's."""
    return hmac.digest(credential, b"ranks", "sha256")
