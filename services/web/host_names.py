"""By which names may a request call this server?

A web page may have a name that is made to point at this machine (DNS rebinding): for the browser the server
is then a part of that page's site, which reads all that it is answered. The name that the request is for
gives it away. An address cannot be made to point anywhere, and `localhost` is not looked up by browsers.
"""

import re
from collections.abc import Sequence
from typing import Final

import httptools

from baton.web.http_refusals import NO_HTTP, ONE_HOST, HttpRefusal
from baton.web.ip_addresses import packed

AUTHORITY: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*)(?::\d{0,5})?")
ORIGIN_FORM: Final = (b"/", b"*")
LOOPBACK: Final = "localhost"


class HostNames:
    """Of one port."""

    def __init__(self, allowed: Sequence[str] = (), *, any_name: bool) -> None:
        """`any_name`: whichever is taken. Else addresses, this machine's own names, and those `allowed`."""
        self._any_name = any_name
        self._allowed = frozenset(map(_plain, allowed))

    def refusal(self, version: str, target: bytes, hosts: Sequence[bytes]) -> HttpRefusal | None:
        """`hosts`: the values of all Host headers. A target that names a host is judged by that as well."""
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
        return packed(name.strip("[]")) is not None


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _host_of(target: bytes) -> bytes:
    """What is not even a host is what it is not."""
    try:
        return httptools.parse_url(target).host or b"?"
    except httptools.HttpParserInvalidURLError:
        return b"?"


ANY_NAME: Final = HostNames(any_name=True)
