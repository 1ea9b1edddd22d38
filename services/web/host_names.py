"""Host names under which clients may call a server.

A web page's own name may be made to point at this machine (DNS rebinding). For the browser the server is then
part of that page's site, and the page can read all answers. The Host header of such requests has the page's
name. An IP address cannot be redirected in this way, and browsers do not look up `localhost`.
"""

import re
from collections.abc import Sequence
from typing import Final

import httptools

from baton.web.http_refusals import NO_HTTP, ONE_HOST, HttpRefusal
from baton.web.ip_addresses import address_bytes

AUTHORITY: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*)(?::\d{0,5})?")
ORIGIN_FORM: Final = (b"/", b"*")
LOOPBACK: Final = "localhost"


class HostNames:
    """Host names under which requests to one port are allowed."""

    def __init__(self, allowed: Sequence[str] = (), *, any_name: bool) -> None:
        """Create the set of allowed host names.

        `any_name`: whether every name is allowed. Otherwise IP addresses, `localhost` and the names in
        `allowed` are.
        """
        self._any_name = any_name
        self._allowed = frozenset(map(_plain, allowed))

    def refusal(self, version: str, target: bytes, hosts: Sequence[bytes]) -> HttpRefusal | None:
        """Return the refusal of a request that names a wrong host, or None if it may be answered.

        `version`: HTTP version of the request. `target`: request target. If it has a host, that is checked,
        too. `hosts`: values of all Host headers.
        """
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            return ONE_HOST
        called = [*hosts]
        if not target.startswith(ORIGIN_FORM):
            called.append(_host_of(target))
        for each in called:
            found = AUTHORITY.fullmatch(each.strip())
            if found is None:
                return NO_HTTP
            name = found[1].decode()
            if not (self._any_name or self._known(name)):
                return HttpRefusal(
                    421,
                    "unknown_host",
                    f"Requests for the host {name[:128]!r} are not answered here: ask by an address or"
                    f" {LOOPBACK}, or start the server with --allowed-host.",
                )
        return None

    def _known(self, name: str) -> bool:
        plain = _plain(name)
        if plain == LOOPBACK or plain.endswith(f".{LOOPBACK}") or plain in self._allowed:
            return True
        return address_bytes(name.strip("[]")) is not None


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _host_of(target: bytes) -> bytes:
    """Return the host in a request target. For a malformed target it is `?`, which is never allowed."""
    try:
        return httptools.parse_url(target).host or b"?"
    except httptools.HttpParserInvalidURLError:
        return b"?"


ANY_NAME: Final = HostNames(any_name=True)
