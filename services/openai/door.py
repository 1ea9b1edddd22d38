"""Who may come in, and how often?

With keys, each request but the platform's two questions needs one: `Authorization: Bearer KEY`, `x-api-key:
KEY` as Anthropic's clients send it, or, for a person with a browser who only reads, HTTP's basic
authentication with the key as the password. What may come in so often is a POST, which makes somebody
compute, and a wrong key: by the key, or by the address of a caller without one.
"""

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from services.openai.errors import RATE_LIMIT, ApiError
from services.openai.headers import header
from services.openai.rate_limit import RateLimit
from services.runtime.addresses import IPV4_BYTES, MAPPED, packed
from services.runtime.api_keys import ApiKeys

PROBES: Final = frozenset({"/health", "/ready"})
"""What platforms ask, which have no key. They are told no more than whether."""
IN_STATE: Final = "caller"
"""Under which name who asks is in the state of a request's scope."""
READ: Final = "GET"
"""What a HEAD is taken for, too (`edge.py`)."""
REALM: Final = "Baton: any name, and an API key as the password"
"""What a browser shows where it asks for them."""
NETWORK_BITS: Final = 64
"""Of an IPv6 address: what one household or host has all of."""


class Door:
    """Of one HTTP port."""

    def __init__(self, keys: ApiKeys | None = None, rate: RateLimit | None = None) -> None:
        self._keys = keys
        self._rate = rate

    def check(self, scope: Scope) -> None:
        """Let the request in. What is served may tell more to a caller that is `known` (its state says so).
        Raises ApiError: 401, 429."""
        caller = None
        scope["state"][IN_STATE] = _address(scope)
        if self._keys is not None:
            headers = Headers(scope=scope)
            presented, bare = headers.getlist("authorization"), headers.getlist("x-api-key")
            caller = _caller(self._keys, presented, scope["method"]) or _named(self._keys, bare)
            scope["state"]["known"] = caller is not None
            if caller is not None:
                scope["state"][IN_STATE] = caller
            if caller is None and (presented or bare):
                self._count(None, scope)
            if caller is None and scope["path"] not in PROBES:
                raise _unauthorized(scope)
        if scope["method"] != READ:
            self._count(caller, scope)

    def _count(self, caller: bytes | None, scope: Scope) -> None:
        """Raises ApiError."""
        if self._rate is None:
            return
        wait_s = self._rate.take(caller or _address(scope))
        if wait_s:
            raise ApiError(
                429,
                "Too many requests: --rate-limit is reached.",
                kind=RATE_LIMIT,
                code="rate_limit_exceeded",
                headers={"Retry-After": str(math.ceil(wait_s))},
            )


def caller_in(scope: Scope) -> bytes:
    """Who asks, as one that has a share of what is bounded: by the key, or by the address."""
    caller: bytes = scope["state"].get(IN_STATE, b"")
    return caller


def owner_in(scope: Scope) -> bytes:
    """Whose it is what is kept for later: the key's; where no keys are asked for, of whoever knows its id."""
    return caller_in(scope) if scope["state"].get("known", False) else b""


def _caller(keys: ApiKeys, presented: Sequence[str], method: str) -> bytes | None:
    if len(presented) != 1:
        return None
    scheme, _, rest = presented[0].strip().partition(" ")
    match scheme.lower():
        case "bearer":
            return keys.who(rest.strip())
        case "basic" if method == READ:
            return keys.who(_password(rest.strip()))
        case _:
            return None


def _named(keys: ApiKeys, presented: Sequence[str]) -> bytes | None:
    return keys.who(presented[0].strip()) if len(presented) == 1 else None


def _password(encoded: str) -> str:
    """Of basic authentication; the name before it is anybody's. Empty when there is none."""
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text.partition(":")[2]


def _unauthorized(scope: Scope) -> ApiError:
    person = scope["method"] == READ and "text/html" in (header(scope, b"accept") or "")
    needed = "A valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    by_hand = " A browser asks for a name and a password: any name, and the key as the password."
    return ApiError(
        401,
        needed + by_hand if person else needed,
        code="invalid_api_key",
        headers={"WWW-Authenticate": f'Basic realm="{REALM}", charset="UTF-8"' if person else "Bearer"},
    )


def _address(scope: Scope) -> bytes:
    """Where the request came from, as one caller."""
    client = scope.get("client")
    host = client[0] if client else ""
    address = packed(host.partition("%")[0])
    if address is None:
        return host.encode("utf-8", "surrogatepass")
    if len(address) == IPV4_BYTES or address.startswith(MAPPED):
        return address
    return address[: NETWORK_BITS // 8]
