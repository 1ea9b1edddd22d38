"""Addresses of all bootstraps that `--bootstrap` names, looked up again and again.

An entry of `--bootstrap` is an IP address or a host name, with a port. A host name may stand for several
bootstraps, as the name of a headless Service does. It then has one address for each of them. A name with one
address is left to gRPC, which looks it up itself whenever it connects.
"""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from baton.runtime.logging import Log
from baton.runtime.setting_kinds import join_address, split_address

log = Log(__name__)

LOOKUP_S: Final = 2.0
"""Longest wait for the addresses of all names, in seconds. Until a look-up has ended, the former addresses of
its name count."""

Lookup = Callable[[str, int], Sequence[tuple[Any, ...]]]
"""Function that looks up a host and a port, as `socket.getaddrinfo` does. It may block. Raises OSError."""


def getaddrinfo(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class BootstrapAddresses:
    """Addresses of the bootstraps of a stack, as host:port. Used from one event loop."""

    def __init__(self, entries: Sequence[str], lookup: Lookup = getaddrinfo) -> None:
        """Make the set of addresses of all `entries`, each a host and a port. No name is looked up yet."""
        self._known: dict[str, Sequence[str]] = {entry: (entry,) for entry in entries}
        self._names = [entry for entry in self._known if not is_ip_address(split_address(entry)[0])]
        self._several: dict[str, int] = {}
        """Address family of each name that has had several addresses."""
        self._lookup = lookup
        self._looking: set[str] = set()
        """Names whose look-up has not ended, perhaps because no name server answers. Each has one thread."""

    @property
    def may_change(self) -> bool:
        """Whether some entry is a name, so that another look-up may find other addresses."""
        return bool(self._names)

    @property
    def present(self) -> list[str]:
        """Addresses by the last look-ups, in the order of the entries, each once."""
        return list(dict.fromkeys(address for known in self._known.values() for address in known))

    async def look_up(self, within_s: float = LOOKUP_S) -> list[str]:
        """Look up all names, and return the addresses of all entries.

        A name whose look-up fails, or takes longer than `within_s` seconds, keeps its former addresses. A
        late result counts at the next call.
        """
        starting = [name for name in self._names if name not in self._looking]
        if waits := [self._start(name) for name in starting]:
            await asyncio.wait(waits, timeout=within_s)
        return self.present

    def _start(self, name: str) -> "asyncio.Future[None]":
        """Look up a name in a thread of its own. It is a daemon, so that no name server holds up the end of
        the process. Return a future of the end of the look-up."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._looking.add(name)

        def end(found: Sequence[tuple[Any, ...]]) -> None:
            self._looking.discard(name)
            self._take(name, found)
            if not ended.done():
                ended.set_result(None)

        def work() -> None:
            try:
                found = self._lookup(*split_address(name))
            except (OSError, UnicodeError) as error:
                log.debug("a name could not be looked up", name=name, cause=str(error))
                found = ()
            with suppress(RuntimeError):  # the loop is closed, because the process ends
                loop.call_soon_threadsafe(end, found)

        threading.Thread(target=work, name="look-up", daemon=True).start()
        return ended

    def _take(self, name: str, found: Sequence[tuple[Any, ...]]) -> None:
        """Store the addresses that a look-up of a name has found. Without any, the former ones count.

        A host may have an address of each family, such as localhost. So addresses count as several bootstraps
        only if they are of one family.
        """
        by_family: dict[int, dict[str, None]] = {}
        for family, _, _, _, address in found:
            by_family.setdefault(int(family), {})[join_address(address[0], address[1])] = None
        if name not in self._several:
            several = (family for family, addresses in by_family.items() if len(addresses) > 1)
            family = next(several, None)
            if family is None:
                return
            self._several[name] = family
        addresses = by_family.get(self._several[name])
        if addresses:
            self._known[name] = tuple(sorted(addresses))


def is_ip_address(host: str) -> bool:
    """Return whether a host is an IP address, rather than a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
