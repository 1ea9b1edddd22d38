"""Bounds on what the connections of one HTTP port take together: their number, and the bytes that they hold.

A connection holds a head that is not whole, requests that wait behind the one that is being answered, and
what its client has not read. When a bound is reached, connections that wait for their clients make room.
They are those of the address that takes most on which nothing moved for longest. So no address shuts another
out, and no answer that is being computed is cut (`bounded-admission`).
"""

import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final

from baton.runtime.log_throttle import LogThrottle
from baton.runtime.logging import Log
from baton.web.closed_connections import LIMIT, ClosedConnections
from baton.web.ip_addresses import network_of

log = Log(__name__)

CONNECTIONS_MAX: Final = 16_384
TOTAL_BYTES_MAX: Final = 256 * 2**20
COUNTED_BYTES_MAX: Final = 16 * 2**20
"""As how much one connection counts at most: a long answer to a client that reads it makes no room."""
SLACK: Final = 16
"""This part of a bound is freed when it is reached, since whoever makes room is looked for among all."""


class ConnectionEntry:
    """One connection's part of the limits of its port."""

    __slots__ = ("can_close", "close", "held", "limits", "moved_s", "network")

    def __init__(self, limits: "ConnectionLimits", network: bytes) -> None:
        self.limits = limits
        self.network = network
        self.held = 0
        """Bytes."""
        self.moved_s = time.monotonic()
        """When bytes moved last, seconds."""
        self.close: Callable[[], object] = _nothing
        """Ends the connection at once."""
        self.can_close: Callable[[], bool] = _always
        """Whether the connection waits for its client."""

    def hold(self, size: int) -> None:
        """From here on the connection holds `size` bytes. It may be closed in here."""
        if size or self.held:
            self.limits.hold(self, min(size, COUNTED_BYTES_MAX))

    def move(self) -> None:
        """Bytes moved."""
        self.moved_s = time.monotonic()

    def leave(self) -> None:
        """The connection is closed. Idempotent."""
        self.limits.remove(self)
        self.close, self.can_close = _nothing, _always  # what they are bound to leads back here


def _nothing() -> None:
    pass


def _always() -> bool:
    return True


def _one(_: ConnectionEntry) -> int:
    return 1


def _held(entry: ConnectionEntry) -> int:
    return entry.held


class ConnectionLimits:
    """Used from one event loop."""

    def __init__(
        self,
        connections: ClosedConnections,
        connections_max: int = CONNECTIONS_MAX,
        total_bytes_max: int | None = None,
    ) -> None:
        self._connections = connections
        self._connections_max = connections_max
        self._held_bytes_max = TOTAL_BYTES_MAX if total_bytes_max is None else total_bytes_max
        self._entries: set[ConnectionEntry] = set()
        self._held_bytes = 0
        self._next_look_bytes = 0
        """Bytes up to which no connection is looked for that may be closed."""
        self._seldom = LogThrottle()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def total_bytes(self) -> int:
        return self._held_bytes

    def admit(self, address: Any) -> ConnectionEntry | None:
        """A new connection's entry; None if there is no room for one. `address`: of its socket."""
        if len(self._entries) >= self._connections_max:
            self._make_room(_one, len(self._entries), self._connections_max)
        if len(self._entries) >= self._connections_max:
            self._count("connections", 1)
            return None
        host = str(address[0]) if isinstance(address, tuple) and address else ""
        entry = ConnectionEntry(self, network_of(host))
        self._entries.add(entry)
        return entry

    def hold(self, entry: ConnectionEntry, size: int) -> None:
        """`entry` holds `size` bytes from here on."""
        if entry not in self._entries:
            return
        self._held_bytes += size - entry.held
        entry.held = size
        most = self._held_bytes_max
        if self._held_bytes > max(most, self._next_look_bytes):
            self._make_room(_held, self._held_bytes, most)
            # Each look goes over all connections: where none may be closed, the next waits for more bytes.
            self._next_look_bytes = self._held_bytes + most // SLACK if self._held_bytes > most else 0

    def remove(self, entry: ConnectionEntry) -> None:
        if entry in self._entries:
            self._entries.discard(entry)
            self._held_bytes -= entry.held
            entry.held = 0

    def _make_room(self, cost: Callable[[ConnectionEntry], int], taken: int, most: int) -> None:
        """Close connections until `taken` is well below `most`. `cost`: what closing one gives."""
        by_network: dict[bytes, int] = {}
        closable: dict[bytes, list[ConnectionEntry]] = {}
        for entry in self._entries:
            by_network[entry.network] = by_network.get(entry.network, 0) + cost(entry)
            if cost(entry) and entry.can_close():
                closable.setdefault(entry.network, []).append(entry)
        for entries in closable.values():
            entries.sort(key=lambda entry: -entry.moved_s)
        largest = [(-by_network[network], network) for network in closable]
        heapify(largest)
        closed = 0
        while taken > most - max(most // SLACK, 1) and largest:
            total, network = heappop(largest)
            entry = closable[network].pop()
            taken -= cost(entry)
            if closable[network]:
                heappush(largest, (total + cost(entry), network))
            self.remove(entry)
            entry.close()
            closed += 1
        self._count("connections" if cost is _one else "bytes", closed)

    def _count(self, limit: str, closed: int) -> None:
        if not closed:
            return
        self._connections.count(LIMIT, closed)
        if times := self._seldom.happened(closed):
            log.warning(
                "connections were closed: a limit of the HTTP port is reached", limit=limit, times=times
            )
