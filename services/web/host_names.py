"""Host names under which requests may call a server.

A web page's own name may be made to point at this machine (DNS rebinding). For the browser the server is then
part of that page's site, and the page can read all answers. The Host header of such requests has that name.
An address cannot be redirected in this way, and browsers do not look up `localhost`.
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
    """Allowed host names of one port."""

    def __init__(self, allowed: Sequence[str] = (), *, any_name: bool) -> None:
        """`any_name`: allow every name. Otherwise addresses, names of this machine and `allowed` are."""
        self._any_name = any_name
        self._allowed = frozenset(map(_plain, allowed))

    def refusal(self, version: str, target: bytes, hosts: Sequence[bytes]) -> HttpRefusal | None:
        """Return why a request is refused, or None.

        `hosts`: values of all Host headers. A `target` with a host is checked against it, too.
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
    """Return the host of a request target. A malformed one becomes `?`, which is never allowed."""
    try:
        return httptools.parse_url(target).host or b"?"
    except httptools.HttpParserInvalidURLError:
        return b"?"


ANY_NAME: Final = HostNames(any_name=True)
