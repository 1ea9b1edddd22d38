"""Authentication by API keys, rights of operators, and rate limits, for each request.

With keys, every request but the platform's probes needs one: `Authorization: Bearer KEY`, or `x-api-key:
KEY` as Anthropic's clients send it. A person with a browser, who only reads, may use HTTP's basic
authentication with the key as the password. The rate limit counts POSTs, which cost computation, and wrong
keys: by the key, or by the address of a caller without one.

Operators' pages need an admin key. Without admin keys they are open to every caller, unless there are
several API keys (`--open-admin` changes that).
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
"""Paths of platforms' probes, which have no key. They answer yes or no, and nothing else."""
IN_STATE: Final = "caller"
"""Key of the caller in the state of a request's scope."""
PREFIX_OWNER: Final = "prefix_owner"
"""Key of the caller whose prompts share no prefix with other callers', likewise."""
METRICS: Final = "/metrics"
NEEDS_KEY: Final = "A valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
NEEDS_ADMIN_KEY: Final = (
    "This is for operators: it needs an admin key (--admin-api-key-file, BATON_ADMIN_API_KEYS) or a port of"
    " its own (--admin-port). --open-admin opens it to every API key."
)
READ: Final = "GET"
"""Method of reading. A HEAD counts as one (`middleware.py`)."""
REALM: Final = "Baton: any name, and an API key as the password"
"""Text that a browser shows when it asks for a name and a password."""


class AccessControl:
    """Who may use one HTTP port, and how often."""

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
        """`open_admin`: every API key reads operators' pages, even if there are several keys.
        `share_prefixes`: API keys share prefix caches. `open_metrics`: /metrics needs no key on this port."""
        self._keys = keys
        self._rate = rate
        self._admin_keys = admin_keys
        self._open_admin = open_admin
        self._share_prefixes = share_prefixes
        self._open_metrics = open_metrics

    def check(self, scope: Scope) -> None:
        """Admit the request, and note its caller's rights in its state: `known` (it has a key), `operator`,
        and the owner of its prefixes. Raises ApiError: 401, 429."""
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
        """Return the caller with one of these keys, and whether it is an admin key."""
        for these, is_admin in ((self._admin_keys, True), (self._keys, False)):
            callers = [] if these is None else map(these.caller_of, keys)
            if found := next((each for each in callers if each is not None), None):
                return found, is_admin
        return None, False

    def _opens(self, path: str) -> bool:
        """Whether callers without an admin key may read this operators' page."""
        if self._open_metrics and path == METRICS:
            return True
        if self._admin_keys is not None:
            return False
        return self._open_admin or self._keys is None or not self._keys.several

    def _divides(self, *, is_admin: bool) -> bool:
        """Whether the caller's key has a prefix cache of its own. A single API key shares that of all
        callers."""
        several = is_admin or (self._keys is not None and self._keys.several)
        return several and not self._share_prefixes

    def _count(self, caller: bytes | None, scope: Scope) -> None:
        """Count a request against the rate limit. Raises ApiError: 429."""
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
    """Identity of the caller, by which bounds are shared: from its key, or from its address."""
    caller: bytes = scope["state"].get(IN_STATE, b"")
    return caller


def owner_in(scope: Scope) -> bytes:
    """Owner of what is stored: the key. Without keys, empty: anybody who knows an id may use it."""
    return caller_in(scope) if scope["state"].get("known", False) else b""


def prefix_owner_in(scope: Scope) -> bytes:
    """The caller if it shares no prefix with others. Empty: it shares prefixes."""
    owner: bytes = scope["state"].get(PREFIX_OWNER, b"")
    return owner


async def operators_only(request: Request) -> None:
    """Dependency of a route: refuse callers that are no operators. Raises ApiError: 401, 403."""
    state = request.scope.get("state", {})
    if state.get("operator", True):
        return
    if not state.get("known", False):
        raise unauthorized(request.scope, NEEDS_ADMIN_KEY)
    raise ApiError(403, NEEDS_ADMIN_KEY, code="insufficient_permissions")


async def known_callers_only(request: Request) -> None:
    """Dependency of a route for pages without data: let a browser ask its user for a key first. Raises
    ApiError: 401."""
    state = request.scope.get("state", {})
    if not (state.get("operator", True) or state.get("known", False)):
        raise unauthorized(request.scope, NEEDS_ADMIN_KEY)


def _keys_in(headers: Headers, method: str) -> list[str]:
    """Return the keys of a request: at most one in each of two headers."""
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
    """Return the password of basic authentication, whatever the name. Empty if there is none."""
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text.partition(":")[2]


def unauthorized(scope: Scope, needed: str = NEEDS_KEY) -> ApiError:
    """Return a 401. `needed`: a sentence that says what is missing."""
    person = scope["method"] == READ and "text/html" in Headers(scope=scope).get("accept", "")
    by_hand = " A browser asks for a name and a password: any name, and the key as the password."
    return ApiError(
        401,
        needed + by_hand if person else needed,
        code="invalid_api_key",
        headers={"WWW-Authenticate": f'Basic realm="{REALM}", charset="UTF-8"' if person else "Bearer"},
    )


def _address(scope: Scope) -> bytes:
    """Identity of a caller without a key: the network of its address."""
    client = scope.get("client")
    return network_of(client[0] if client else "")
