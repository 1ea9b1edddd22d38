"""Signatures of reasoning that clients send back.

A client that stores its own history carries a model's reasoning in `encrypted_content`. It is signed, so
that nobody can invent reasoning of the model. It is not encrypted: the answer shows it.

Pure.
"""

import base64
import binascii
import hmac
from typing import Final

MARK: Final = "baton1."
"""Prefix of all of them: the format and its version."""
DIGEST: Final = "sha256"
DIGEST_BYTES: Final = 32
KEY_BYTES: Final = 32


class NotOurs(ValueError):
    """It was not signed by this key, or it was changed."""


class ReasoningSigner:
    """Signs with one key. Processes with the same key accept each other's signatures."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def wrap(self, reasoning: str) -> str:
        text = reasoning.encode("utf-8", "surrogatepass")
        return MARK + base64.urlsafe_b64encode(self._sign(text) + text).decode()

    def unwrap(self, carried: str) -> str:
        """Return the reasoning. Raises NotOurs."""
        if not carried.startswith(MARK):
            raise NotOurs
        try:
            whole = base64.b64decode(carried.removeprefix(MARK), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise NotOurs from None
        signature, text = whole[:DIGEST_BYTES], whole[DIGEST_BYTES:]
        if not hmac.compare_digest(signature, self._sign(text)):
            raise NotOurs
        return text.decode("utf-8", "surrogatepass")

    def _sign(self, text: bytes) -> bytes:
        return hmac.digest(self._key, MARK.encode() + text, DIGEST)
