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
    """Bytes of one request body that count in a `BodyPool`."""

    __slots__ = ("arrived_s", "bytes", "caller", "dropped", "on_drop")

    def __init__(self, caller: bytes, on_drop: Callable[[], None]) -> None:
        """Start with 0 bytes. `on_drop`: called if the pool drops the body while it is still arriving."""
        self.caller = caller
        self.on_drop = on_drop
        self.bytes = 0
        self.arrived_s = 0.0
        """Time at which the body's last bytes arrived, in seconds of the event loop's clock."""
        self.dropped = False


class BodyPool:
    """Limit on the bytes of all request bodies in memory, and on the bytes of each caller's bodies. Used from
    one event loop."""

    def __init__(self, bytes_max: int, caller_bytes_max: int, full: str = FULL) -> None:
        """Set both limits in bytes. `full`: error message for a caller whose body does not fit."""
        self._bytes_max = bytes_max
        self._caller_bytes_max = caller_bytes_max
        self._full = full
        self._by_caller: dict[bytes, int] = {}
        self._incoming: dict[bytes, OrderedDict[PooledBody, None]] = {}
        """Incomplete bodies, by caller. The body that has waited longest for new bytes comes first."""
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
        """Mark a body as complete, so that it can no longer be dropped. Idempotent."""
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
        """Return the incomplete body of the same caller that has stalled longest, other than `body`. None if
        no such body has stalled for STALLED_S."""
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
    """One request body that counts in two pools: its first bytes in one, the rest in the other
    (`bounded-admission`)."""

    def __init__(self, caller: bytes, beginnings: BodyPool, rests: BodyPool, beginning_bytes: int) -> None:
        """Start with 0 bytes. `beginnings`: pool for the first `beginning_bytes` bytes of each body. `rests`:
        pool for all further bytes."""
        self._pools = beginnings, rests
        self._shares = PooledBody(caller, self._drop), PooledBody(caller, self._drop)
        self._beginning_bytes = beginning_bytes
        self._deadline: asyncio.Timeout | None = None
        self.size = 0
        """Number of bytes of the body that have arrived."""
        self.is_whole = False

    @property
    def was_dropped(self) -> bool:
        """Whether a pool dropped the body to free memory for another body."""
        return any(share.dropped for share in self._shares)

    def begin(self, deadline: asyncio.Timeout) -> None:
        """Set the timeout within which the body is read. It is made to expire at once if the body is
        dropped."""
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
        """Mark the body as complete, so that it can no longer be dropped."""
        self.is_whole = True
        for pool, share in zip(self._pools, self._shares, strict=True):
            pool.finish(share)

    def release(self) -> None:
        """Give the body's bytes back to both pools, once its texts are no longer needed."""
        for pool, share in zip(self._pools, self._shares, strict=True):
            pool.release(share)

    def overloaded(self) -> Overloaded:
        """Return the error for a body that was dropped."""
        return self._pools[0].overloaded()

    def _drop(self) -> None:
        self.release()
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())
