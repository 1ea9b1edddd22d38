"""Ids of the events of streams: identity of the stream, position, and a signature of both.

    IDENTITY.POSITION.SIGNATURE

The signature is keyed by a key that all routers of a stack share. So a router knows that an id was issued
by its stack, and computes nothing for others (`stream-is-prefix`). It is blake2b.
Its state with the key and the identity is prepared once for each stream.

No I/O, clock or threads.
"""

import hmac
from binascii import b2a_base64
from hashlib import blake2b
from typing import Final

from baton.api.resuming.drawn_values import DrawnValues, derive_root
from baton.api.resuming.stream_identity import StreamIdentity, decode_identity
from baton.api.resuming.stream_position import PositionWriter, StreamPosition, parse_position

LABEL: Final = b"baton: ids of events, version 1"
VALUES_LABEL: Final = b"baton: values drawn for a request, version 1"
SIGNATURE_BYTES: Final = 12
"""Length in bytes of a signature, a multiple of 3: in base64 it then has no padding."""
ID_CHARS_MAX: Final = 4096
"""Most characters of an id that is read. The longest that is issued has fewer."""


class EventIdSigner:
    """Issuer and checker of event ids, with one key. Processes with the same key accept each other's ids."""

    def __init__(self, key: bytes) -> None:
        """Derive the keys. `key`: secret that all routers of a stack share."""
        self._key = hmac.digest(key, LABEL, "sha256")
        self._values_key = hmac.digest(key, VALUES_LABEL, "sha256")

    def values(self, request_id: str, nonce: bytes) -> DrawnValues:
        """Return the values that are drawn for a request. `nonce`: NONCE_BYTES, drawn for it."""
        return DrawnValues(derive_root(self._values_key, request_id, nonce))

    def issue(self, identity: StreamIdentity, choices: int, sent: StreamPosition | None = None) -> "EventIds":
        """Return the ids of one stream's events. `choices`: number of its choices, of all prompts. `sent`:
        position up to which the client of a resumed stream has the events."""
        return EventIds(identity.encode().encode(), self._key, PositionWriter(choices, sent))

    def read(self, id_: str) -> tuple[StreamIdentity, StreamPosition] | None:
        """Return the stream and the position that an id names. None: this stack did not issue the id."""
        head, _, signature = id_.rpartition(".")
        if len(id_) > ID_CHARS_MAX or not id_.isascii():
            return None
        own = _line_end(blake2b(head.encode(), key=self._key, digest_size=SIGNATURE_BYTES))
        if not hmac.compare_digest(own, b"%b\n" % signature.encode()):
            return None
        text, _, place = head.partition(".")
        identity, position = decode_identity(text), parse_position(place)
        return None if identity is None or position is None else (identity, position)


class EventIds:
    """Writer of the id lines of one stream's events."""

    __slots__ = ("_head", "_signer", "position")

    def __init__(self, identity: bytes, key: bytes, position: PositionWriter) -> None:
        self.position = position
        self._head = b"id: %b." % identity
        self._signer = blake2b(identity + b".", key=key, digest_size=SIGNATURE_BYTES)

    def line(self, position: bytes) -> bytes:
        """Return the line of an event that gives its id. `position`: position after the event."""
        signer = self._signer.copy()
        signer.update(position)
        return b"%b%b.%b" % (self._head, position, _line_end(signer))


def _line_end(signer: blake2b) -> bytes:
    """Return the signature as it stands in an id, and the end of the line."""
    return b2a_base64(signer.digest())
