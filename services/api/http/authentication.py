"""Authentication by API keys, rights of operators, and rate limits, checked for each request.

If API keys are configured, every request needs one, except for the platform's health probes. It is sent as
`Authorization: Bearer KEY`, or as `x-api-key: KEY` by Anthropic's clients. A person with a browser may read
pages by HTTP basic authentication, with the key as the password. The rate limit counts requests other than
GETs, because they cost computation, and requests with a wrong key. It counts by key, or by address if there
is no key.

Operators' pages need an admin key. Without configured admin keys they are open to every caller, unless there
are several API keys (`--open-admin` changes that).
"""

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from baton.api.errors import RATE_LIMIT, ApiError
from baton.api.http.rate_limit import RateLimit
from baton.web.api_keys import ApiKeys, Caller
from baton.web.ip_addresses import network_of

PROBES: Final = frozenset({"/health", "/ping", "/ready"})
"""Paths of a platform's health probes, which need no API key. Their responses reveal only yes or no."""
IN_STATE: Final = "caller"
"""Name of the entry, in the state of a request's ASGI scope, that holds the caller's identity."""
PREFIX_OWNER: Final = "prefix_owner"
"""Name of the entry, in the state of a request's ASGI scope, that identifies a caller with a prefix cache of
its own."""
METRICS: Final = "/metrics"
NEEDS_KEY: Final = "A valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
NEEDS_ADMIN_KEY: Final = (
    "This is for operators: it needs an admin key (--admin-api-key-file, BATON_ADMIN_API_KEYS) or a port of"
    " its own (--admin-port). --open-admin opens it to every API key."
)
READ: Final = "GET"
"""HTTP method of requests that only read, which the rate limit does not count. `middleware.py` turns a HEAD
into a GET."""
REALM: Final = "Baton: any name, and an API key as the password"
"""Realm of HTTP basic authentication: the text with which a browser asks for a name and a password."""


class AccessControl:
    """Decides which callers may use one HTTP port, how often, and with which rights."""

    def __init__(
        self,
        keys: ApiKeys | None = None,
        rate: RateLimit | None = None,
        admin_keys: ApiKeys | None = None,
        *,
        open_admin: bool = False,
        share_prefixes: bool = False,
        open_metrics: bool = False,
    ) -> None:
        """Set the rules for callers.

        `keys`: valid API keys; None: no key is needed. `rate`: rate limit; None: no limit. `admin_keys`: keys
        of operators. `open_admin`: every API key may read operators' pages, even if there are several keys.
        `share_prefixes`: all API keys share prefix caches. `open_metrics`: /metrics needs no key on this
        port.
        """
        self._keys = keys
        self._rate = rate
        self._admin_keys = admin_keys
        self._open_admin = open_admin
        self._share_prefixes = share_prefixes
        self._open_metrics = open_metrics

    def check(self, scope: Scope) -> None:
        """Admit the request, or raise ApiError (401 or 429). Stores the caller's rights in the request's
        state: `known` (has a valid key), `operator` (may read operators' pages), and the owner of its prefix
        cache."""
        state = scope["state"]
        state[IN_STATE] = _address(scope)
        caller, is_admin, is_wrong = None, False, False
        if self._keys is not None or self._admin_keys is not None:
            headers = Headers(scope=scope)
            presented = [*headers.getlist("authorization"), *headers.getlist("x-api-key")]
            caller, is_admin = self._find(_keys_in(headers, scope["method"]))
            state["known"] = caller is not None
            if caller is not None:
                state[IN_STATE] = caller
            is_wrong = caller is None and bool(presented)
            if caller is None and self._keys is not None and scope["path"] not in PROBES:
                if is_wrong:
                    self._count(None, scope)
                raise unauthorized(scope)
        may_ask = caller is not None or self._keys is None
        state["operator"] = is_admin or (may_ask and self._opens(scope["path"]))
        if caller is not None and self._divides(is_admin=is_admin):
            state[PREFIX_OWNER] = caller
        if scope["method"] != READ or is_wrong:
            self._count(caller, scope)

    def _find(self, keys: Sequence[str]) -> tuple[Caller | None, bool]:
        """Return the caller that has one of these API keys, and whether the key is an admin key. The caller
        is None if no key is valid."""
        for these, is_admin in ((self._admin_keys, True), (self._keys, False)):
            callers = [] if these is None else map(these.caller_of, keys)
            if found := next((each for each in callers if each is not None), None):
                return found, is_admin
        return None, False

    def _opens(self, path: str) -> bool:
        """Return whether callers without an admin key may read the operators' page at `path`."""
        if self._open_metrics and path == METRICS:
            return True
        if self._admin_keys is not None:
            return False
        return self._open_admin or self._keys is None or not self._keys.several

    def _divides(self, *, is_admin: bool) -> bool:
        """Return whether the caller's key gets a prefix cache of its own. If there is only one API key, all
        callers share one prefix cache."""
        several = is_admin or (self._keys is not None and self._keys.several)
        return several and not self._share_prefixes

    def _count(self, caller: bytes | None, scope: Scope) -> None:
        """Count a request against the caller's rate limit. Raises ApiError (429) if the limit is reached."""
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
    """Return the caller's identity: a digest of its API key, or its network address. Limits per caller count
    by it."""
    caller: bytes = scope["state"].get(IN_STATE, b"")
    return caller


def owner_in(scope: Scope) -> bytes:
    """Return the owner of an object that the request stores: a digest of its API key. Without keys it is
    empty, and every caller that knows the object's id may use it."""
    return caller_in(scope) if scope["state"].get("known", False) else b""


def prefix_owner_in(scope: Scope) -> bytes:
    """Return the caller's identity if its prompts share no prefix cache with other callers' prompts.
    Otherwise return empty bytes."""
    owner: bytes = scope["state"].get(PREFIX_OWNER, b"")
    return owner


async def operators_only(request: Request) -> None:
    """Refuse callers that are not operators. Used as a FastAPI dependency of operators' routes. Raises
    ApiError: 401 without a valid key, 403 with a key that is not an admin key."""
    state = request.scope.get("state", {})
    if state.get("operator", True):
        return
    if not state.get("known", False):
        raise unauthorized(request.scope, NEEDS_ADMIN_KEY)
    raise ApiError(403, NEEDS_ADMIN_KEY, code="insufficient_permissions")


async def known_callers_only(request: Request) -> None:
    """Refuse callers without a valid key, so that a browser asks its user for one. Used as a FastAPI
    dependency of pages that contain no data themselves. Raises ApiError (401)."""
    state = request.scope.get("state", {})
    if not (state.get("operator", True) or state.get("known", False)):
        raise unauthorized(request.scope, NEEDS_ADMIN_KEY)


def _keys_in(headers: Headers, method: str) -> list[str]:
    """Return the keys that a request presents: at most one in `authorization` and one in `X-Api-Key`."""
    keys = []
    if len(presented := headers.getlist("authorization")) == 1:
        scheme, _, rest = presented[0].strip().partition(" ")
        match scheme.lower():
            case "bearer":
                keys.append(rest.strip())
            case "basic" if method == READ:
                keys.append(_password(rest.strip()))
    if len(bare := headers.getlist("x-api-key")) == 1:
        keys.append(bare[0].strip())
    return keys


def _password(encoded: str) -> str:
    """Return the password from credentials of HTTP basic authentication, for any user name. Empty if there is
    none."""
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text.partition(":")[2]


def unauthorized(scope: Scope, needed: str = NEEDS_KEY) -> ApiError:
    """Return a 401 error. `needed`: sentence that says which key is needed."""
    person = scope["method"] == READ and "text/html" in Headers(scope=scope).get("accept", "")
    by_hand = " A browser asks for a name and a password: any name, and the key as the password."
    return ApiError(
        401,
        needed + by_hand if person else needed,
        code="invalid_api_key",
        headers={"WWW-Authenticate": f'Basic realm="{REALM}", charset="UTF-8"' if person else "Bearer"},
    )


def _address(scope: Scope) -> bytes:
    """Return the identity of a caller without a key: the network of its IP address."""
    client = scope.get("client")
    return network_of(client[0] if client else "")
