"""Who may come in, and how often?

With keys, each request but the platform's two questions needs one: `Authorization: Bearer KEY`, `x-api-key:
KEY` as Anthropic's clients send it, or, for a person with a browser who only reads, HTTP's basic
authentication with the key as the password. What may come in so often is a POST, which makes somebody
compute, and a wrong key: by the key, or by the address of a caller without one.

The pages for operators are for admin keys. Where there are none, they are for every caller, but not where
there are several API keys: `--open-admin` changes that.
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
from baton.api.http.request_headers import header
from baton.web.api_keys import ApiKeys, Caller
from baton.web.ip_addresses import network_of

PROBES: Final = frozenset({"/health", "/ping", "/ready"})
"""What platforms ask, which have no key. They are told no more than whether."""
IN_STATE: Final = "caller"
"""Under which name who asks is in the state of a request's scope."""
PREFIX_OWNER: Final = "prefix_owner"
"""Likewise: the caller whose prompts share no prefix with others'."""
METRICS: Final = "/metrics"
NEEDS_KEY: Final = "A valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
NEEDS_ADMIN_KEY: Final = (
    "This is for operators: it needs an admin key (--admin-api-key-file, BATON_ADMIN_API_KEYS) or a port of"
    " its own (--admin-port). --open-admin opens it to every API key."
)
READ: Final = "GET"
"""What a HEAD is taken for, too (`edge.py`)."""
REALM: Final = "Baton: any name, and an API key as the password"
"""What a browser shows where it asks for them."""


class AccessControl:
    """Of one HTTP port."""

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
        """`open_admin`: every API key reads the pages for operators, also where there are several;
        `share_prefixes`: several API keys share prefix caches; `open_metrics`: /metrics needs no key here."""
        self._keys = keys
        self._rate = rate
        self._admin_keys = admin_keys
        self._open_admin = open_admin
        self._share_prefixes = share_prefixes
        self._open_metrics = open_metrics

    def check(self, scope: Scope) -> None:
        """Let the request in, and write to its state what its caller may do: `known` (it has a key),
        `operator`, and with whom its prompts share prefixes. Raises ApiError: 401, 429."""
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
        """The caller with one of these keys, and whether it is an admin's."""
        for these, is_admin in ((self._admin_keys, True), (self._keys, False)):
            callers = [] if these is None else map(these.who, keys)
            if found := next((each for each in callers if each is not None), None):
                return found, is_admin
        return None, False

    def _opens(self, path: str) -> bool:
        """Whether callers without an admin key read the pages for operators."""
        if self._open_metrics and path == METRICS:
            return True
        if self._admin_keys is not None:
            return False
        return self._open_admin or self._keys is None or not self._keys.several

    def _divides(self, *, is_admin: bool) -> bool:
        """Whether this key has a prefix cache of its own. A single API key has the one of callers without."""
        several = is_admin or (self._keys is not None and self._keys.several)
        return several and not self._share_prefixes

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


def prefix_owner_in(scope: Scope) -> bytes:
    """The caller that shares no prefix with any other; empty: prefixes are shared."""
    owner: bytes = scope["state"].get(PREFIX_OWNER, b"")
    return owner


async def operators_only(request: Request) -> None:
    """A route's dependency: refuse callers that are no operators. Raises ApiError: 401, 403."""
    state = request.scope.get("state", {})
    if state.get("operator", True):
        return
    if not state.get("known", False):
        raise unauthorized(request.scope, NEEDS_ADMIN_KEY)
    raise ApiError(403, NEEDS_ADMIN_KEY, code="insufficient_permissions")


async def known_callers_only(request: Request) -> None:
    """A route's dependency, for pages without data: let a browser ask its user for a key first. Raises
    ApiError: 401."""
    state = request.scope.get("state", {})
    if not (state.get("operator", True) or state.get("known", False)):
        raise unauthorized(request.scope, NEEDS_ADMIN_KEY)


def _keys_in(headers: Headers, method: str) -> list[str]:
    """The keys that a request shows: at most one in each of two headers."""
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
    """Of basic authentication; the name before it is anybody's. Empty when there is none."""
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text.partition(":")[2]


def unauthorized(scope: Scope, needed: str = NEEDS_KEY) -> ApiError:
    """401. `needed`: what is missing, in a sentence."""
    person = scope["method"] == READ and "text/html" in (header(scope, b"accept") or "")
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
    return network_of(client[0] if client else "")
