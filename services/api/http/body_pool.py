"""Memory limits for request bodies, shared fairly among callers.

A body counts from its first byte until its texts are no longer needed. If the pool is full, an incomplete
body of the caller with the most bytes is dropped, so that no caller shuts another out. Among the bodies of
one caller, a newer body may only displace an incomplete one that has stalled (`bounded-admission`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from baton.api.backend import Overloaded

STALLED_S: Final = 1.0
"""Seconds without a new byte after which an incomplete body may be dropped for another body of its caller."""
RETRY_AFTER_S: Final = 1
FULL: Final = "too many requests are being read"


class PooledBody:
    """Byte count of one request body in one `BodyPool`."""

    __slots__ = ("arrived_s", "bytes", "caller", "dropped", "on_drop")

    def __init__(self, caller: bytes, on_drop: Callable[[], None]) -> None:
        """Start with 0 bytes. `on_drop`: called if the pool drops the body while it is still arriving."""
        self.caller = caller
        self.on_drop = on_drop
        self.bytes = 0
        self.arrived_s = 0.0
        """Time at which the body's last bytes arrived so far, in seconds of the event loop's clock."""
        self.dropped = False


class BodyPool:
    """Limit on the bytes of all request bodies in memory, and on the bytes of each caller's bodies. Used from
    one event loop."""

    def __init__(self, bytes_max: int, caller_bytes_max: int, full: str = FULL) -> None:
        """Create an empty pool. `bytes_max`: most bytes of all bodies. `caller_bytes_max`: most bytes of one
        caller's bodies. `full`: error message for a caller whose body does not fit."""
        self._bytes_max = bytes_max
        self._caller_bytes_max = caller_bytes_max
        self._full = full
        self._by_caller: dict[bytes, int] = {}
        self._incoming: dict[bytes, OrderedDict[PooledBody, None]] = {}
        """Bodies that are still arriving, by caller. The one that got no bytes for the longest time comes
        first."""
        self.bytes = 0

    def overloaded(self) -> Overloaded:
        return Overloaded(self._full, RETRY_AFTER_S)

    def take(self, body: PooledBody, more: int) -> None:
        """Count `more` bytes of a body that is arriving. Drops other bodies if the pool is full. Raises
        Overloaded if there is still no space."""
        now_s = asyncio.get_running_loop().time()
        while (own := self._by_caller.get(body.caller, 0) + more) > self._caller_bytes_max:
            self._drop(self._stalled(body, now_s))
        while self.bytes + more > self._bytes_max:
            self._drop(self._largest_callers_body(own) or self._stalled(body, now_s))
        self._add(body, more)
        body.arrived_s = now_s
        incoming = self._incoming.setdefault(body.caller, OrderedDict())
        incoming[body] = None
        incoming.move_to_end(body)

    def finish(self, body: PooledBody) -> None:
        """Record that all bytes of the body have arrived, so that the body can no longer be dropped.
        Idempotent."""
        incoming = self._incoming.get(body.caller)
        if incoming is not None and body in incoming:
            del incoming[body]
            if not incoming:
                del self._incoming[body.caller]

    def release(self, body: PooledBody) -> None:
        """Give a body's bytes back to the pool, once its texts are no longer needed. Idempotent."""
        self.finish(body)
        self._add(body, -body.bytes)

    def _add(self, body: PooledBody, more: int) -> None:
        if not more:
            return
        body.bytes += more
        self.bytes += more
        self._by_caller[body.caller] = self._by_caller.get(body.caller, 0) + more
        if not self._by_caller[body.caller]:
            del self._by_caller[body.caller]

    def _drop(self, body: PooledBody | None) -> None:
        if body is None:
            raise self.overloaded()
        body.dropped = True
        self.release(body)
        body.on_drop()

    def _stalled(self, body: PooledBody, now_s: float) -> PooledBody | None:
        """Return the caller's incomplete body that got no bytes for the longest time, other than `body`. None
        if it got some in the last STALLED_S seconds."""
        oldest = next((each for each in self._incoming.get(body.caller, ()) if each is not body), None)
        if oldest is None or now_s - oldest.arrived_s < STALLED_S:
            return None
        return oldest

    def _largest_callers_body(self, own: int) -> PooledBody | None:
        """Return an incomplete body of the caller with the most bytes in the pool. None if that caller has at
        most `own` bytes."""
        largest = max(self._incoming, key=self._by_caller.__getitem__, default=None)
        if largest is None or self._by_caller[largest] <= own:
            return None
        return next(iter(self._incoming[largest]))


class IncomingBody:
    """Count of one request body in two memory pools: its first bytes in one, the other bytes in the second
    (`bounded-admission`)."""

    def __init__(self, caller: bytes, beginnings: BodyPool, rests: BodyPool, beginning_bytes: int) -> None:
        """Start with 0 bytes.

        `beginnings`: memory pool in which the first `beginning_bytes` bytes count. `rests`: pool in which all
        further bytes count.
        """
        self._pools = beginnings, rests
        self._shares = PooledBody(caller, self._drop), PooledBody(caller, self._drop)
        self._beginning_bytes = beginning_bytes
        self._deadline: asyncio.Timeout | None = None
        self.size = 0
        """Number of bytes of the body that have arrived so far."""
        self.is_whole = False

    @property
    def was_dropped(self) -> bool:
        """Whether a pool dropped the body to free memory for another body."""
        return any(share.dropped for share in self._shares)

    def begin(self, deadline: asyncio.Timeout) -> None:
        """Set the timeout that bounds the reading of the body. If the pool drops the body, this timeout
        expires at once."""
        self._deadline = deadline

    def grow(self, more: int) -> None:
        """Count `more` bytes of the body that have arrived. Raises Overloaded if the pools have no space for
        them."""
        if self.was_dropped:
            raise self.overloaded()
        first = min(more, max(self._beginning_bytes - self.size, 0))
        self.size += more
        for pool, share, part in zip(self._pools, self._shares, (first, more - first), strict=True):
            if part:
                pool.take(share, part)

    def finish(self) -> None:
        """Record that all bytes of the body have arrived, so that the body can no longer be dropped."""
        self.is_whole = True
        for pool, share in zip(self._pools, self._shares, strict=True):
            pool.finish(share)

    def release(self) -> None:
        """Give the body's bytes back to both memory pools, once its texts are no longer needed."""
        for pool, share in zip(self._pools, self._shares, strict=True):
            pool.release(share)

    def overloaded(self) -> Overloaded:
        """Return the error that the client gets if its body was dropped from the pool."""
        return self._pools[0].overloaded()

    def _drop(self) -> None:
        self.release()
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())
