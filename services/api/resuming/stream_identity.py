"""Identity of a streamed answer: all that its events depend on beside the body of the request.

It is a part of each event's id. A router that gets it with the same body computes the same events again.

The bytes are those of FRAME, then `max_tokens` of each prompt (4 bytes each), then the request id.

No I/O, clock or threads.
"""

import base64
import binascii
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from baton.api.resuming.drawn_values import NONCE_BYTES

VERSION: Final = 1
ROUTES: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/invocations",
)
"""Path templates of the routes whose streams can be resumed."""
DRAWN_ID: Final = 1
"""Flag: the router drew the request id, which is 32 hexadecimal digits and is stored as 16 bytes."""
FRAME: Final = struct.Struct(f">BBB{NONCE_BYTES}sI8s4s4sB")
"""Layout of the first bytes: version, index of the route, flags, nonce, creation time, digests of body, model
and engine, number of prompts."""
TOKENS: Final = struct.Struct(">I")
BODY_BYTES: Final = 8
MODEL_BYTES: Final = 4
UNKNOWN_ENGINE: Final = bytes(MODEL_BYTES)


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """All that the events of a stream depend on beside the body of its request."""

    route: str
    request_id: str
    has_drawn_id: bool
    """Whether the router drew the request id. Otherwise the client chose it."""
    nonce: bytes
    """Random part of the root of the drawn values, NONCE_BYTES."""
    created_s: int
    """Time at which the answer was begun, seconds since the epoch."""
    body: bytes
    """Digest of the request's body."""
    model: bytes
    """Digest of the model and of what renders its answers."""
    engine: bytes
    """Digest of the workers' engine. UNKNOWN_ENGINE: no worker was known."""
    max_tokens: tuple[int, ...]
    """Most output tokens of each choice, by prompt. They may depend on the workers of that time."""

    def encode(self) -> str:
        """Return the identity as text, in the alphabet of base64url."""
        frame = FRAME.pack(
            VERSION,
            ROUTES.index(self.route),
            DRAWN_ID if self.has_drawn_id else 0,
            self.nonce,
            self.created_s,
            self.body,
            self.model,
            self.engine,
            len(self.max_tokens),
        )
        name = bytes.fromhex(self.request_id) if self.has_drawn_id else self.request_id.encode()
        whole = frame + b"".join(map(TOKENS.pack, self.max_tokens)) + name
        return base64.urlsafe_b64encode(whole).rstrip(b"=").decode()


def decode_identity(text: str) -> StreamIdentity | None:
    """Return the identity that `text` holds, or None if it holds none of this version."""
    try:
        whole = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        version, route, flags, nonce, created_s, body, model, engine, prompts = FRAME.unpack_from(whole)
        rest = FRAME.size + TOKENS.size * prompts
        if version != VERSION or len(whole) < rest or route >= len(ROUTES):
            return None
        tokens = tuple(each for (each,) in TOKENS.iter_unpack(whole[FRAME.size : rest]))
        name = whole[rest:].hex() if flags & DRAWN_ID else whole[rest:].decode()
    except (binascii.Error, struct.error, UnicodeDecodeError, ValueError):
        return None
    drawn = bool(flags & DRAWN_ID)
    return StreamIdentity(ROUTES[route], name, drawn, nonce, created_s, body, model, engine, tokens)


def digest_of_body(body: bytes | bytearray) -> bytes:
    return blake2b(body, digest_size=BODY_BYTES).digest()


def digest_of_texts(*texts: object) -> bytes:
    """Return a short digest of several values, by their texts."""
    return blake2b("\0".join(map(str, texts)).encode(), digest_size=MODEL_BYTES).digest()
