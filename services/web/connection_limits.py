"""Limits on the connections of one HTTP port: their number, and their memory.

A connection's memory is an incomplete head (request line and headers), requests that wait behind the one
being answered, and answers that its client has not read. When a limit is reached, some connections that wait
for their clients are closed. They are those of the address with the largest share, the longest idle ones
first. So no address shuts another out, and no running answer is cut (`bounded-admission`).
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
"""Most bytes that one connection counts for in the limit. So a long answer to a client that reads closes no
other connections."""
SLACK: Final = 16
"""Divisor of a connection limit. When the limit is reached, 1/SLACK of it is freed at once, because each
search looks at all connections."""


class ConnectionEntry:
    """Entry of one connection in the limits of its HTTP port: its memory, its client's network, and how to
    close it."""

    __slots__ = ("can_close", "close", "limits", "moved_s", "network", "size")

    def __init__(self, limits: "ConnectionLimits", network: bytes) -> None:
        self.limits = limits
        self.network = network
        self.size = 0
        """Memory that the connection counts for, bytes."""
        self.moved_s = time.monotonic()
        """Time, on the monotonic clock in seconds, at which the connection last received or sent bytes."""
        self.close: Callable[[], object] = _nothing
        """Function that closes the connection at once, without an answer."""
        self.can_close: Callable[[], bool] = _always
        """Function that returns whether the connection waits for its client, so that it may be closed."""

    def hold(self, size: int) -> None:
        """Set the memory of the connection to `size` bytes. If a limit is reached, connections are closed.

        This one may be among them.
        """
        if size or self.size:
            self.limits.hold(self, min(size, COUNTED_BYTES_MAX))

    def move(self) -> None:
        """Record that bytes were just received or sent on the connection."""
        self.moved_s = time.monotonic()

    def leave(self) -> None:
        """Remove the closed connection from the limits. Idempotent."""
        self.limits.remove(self)
        self.close, self.can_close = _nothing, _always  # breaks a reference cycle


def _nothing() -> None:
    pass


def _always() -> bool:
    return True


def _one(_: ConnectionEntry) -> int:
    return 1


def _size_of(entry: ConnectionEntry) -> int:
    return entry.size


class ConnectionLimits:
    """Limits on the number and the memory of one port's connections. Used from one event loop."""

    def __init__(
        self,
        connections: ClosedConnections,
        connections_max: int = CONNECTIONS_MAX,
        total_bytes_max: int | None = None,
    ) -> None:
        self._connections = connections
        self._connections_max = connections_max
        self._total_bytes_max = TOTAL_BYTES_MAX if total_bytes_max is None else total_bytes_max
        self._entries: set[ConnectionEntry] = set()
        self._total_bytes = 0
        self._next_look_bytes = 0
        """Total memory, in bytes, above which the next search for connections to close is made. It is raised
        after a search that closed too few."""
        self._throttle = LogThrottle()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def admit(self, address: Any) -> ConnectionEntry | None:
        """Return the entry of a new connection, or None if the port has too many connections.

        `address`: address of the client, as its socket gives it.
        """
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
        """Set the memory of a connection to `size` bytes, and close connections if the limit is exceeded."""
        if entry not in self._entries:
            return
        self._total_bytes += size - entry.size
        entry.size = size
        most = self._total_bytes_max
        if self._total_bytes > max(most, self._next_look_bytes):
            self._make_room(_size_of, self._total_bytes, most)
            # Each search looks at all connections. If it closes none, the next waits for more bytes.
            self._next_look_bytes = self._total_bytes + most // SLACK if self._total_bytes > most else 0

    def remove(self, entry: ConnectionEntry) -> None:
        if entry in self._entries:
            self._entries.discard(entry)
            self._total_bytes -= entry.size
            entry.size = 0

    def _make_room(self, cost: Callable[[ConnectionEntry], int], taken: int, most: int) -> None:
        """Close connections that wait for their clients until `taken` is 1/SLACK below `most`. The networks
        with the largest shares lose theirs first.

        `taken`, `most`: present amount and limit, in connections or bytes. `cost`: returns the amount that
        closing a connection frees.
        """
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
        if times := self._throttle.count(closed):
            log.warning(
                "connections were closed: a limit of the HTTP port is reached", limit=limit, times=times
            )
