"""Signatures of reasoning that clients store and send back.

A client that stores its own history sends a model's reasoning back in `encrypted_content`. The reasoning is
signed, so that a client cannot invent reasoning of the model. It is not encrypted, because the answer shows
it anyway.

No I/O, clock or threads.
"""

import base64
import binascii
import hmac
from typing import Final

MARK: Final = "baton1."
"""Prefix of all signed reasoning: the name and the version of the format."""
DIGEST: Final = "sha256"
DIGEST_BYTES: Final = 32
KEY_BYTES: Final = 32


class NotOurs(ValueError):
    """Error: reasoning was not signed with this server's key, or it was changed."""


class ReasoningSigner:
    """Signer of reasoning with one key. Processes with the same key accept each other's signatures."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def wrap(self, reasoning: str) -> str:
        text = reasoning.encode("utf-8", "surrogatepass")
        return MARK + base64.urlsafe_b64encode(self._sign(text) + text).decode()

    def unwrap(self, carried: str) -> str:
        """Return the text of signed reasoning. Raises NotOurs if the signature is not valid."""
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
