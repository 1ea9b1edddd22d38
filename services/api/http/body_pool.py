"""Memory for request bodies, shared among callers.

A body counts from its first byte until its texts are no longer needed. When the pool is full, a body that is
still coming in is dropped: one of the caller that has most, so that no caller shuts another out. Among the
bodies of one caller, a newer one replaces one that has stalled, and no other (`bounded-admission`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from baton.api.backend import Overloaded

STALLED_S: Final = 1.0
"""Time without a byte after which a body makes room for others of its caller."""
RETRY_AFTER_S: Final = 1
FULL: Final = "too many requests are being read"


class PooledBody:
    """One body's share of a pool."""

    __slots__ = ("arrived_s", "bytes", "caller", "dropped", "on_drop")

    def __init__(self, caller: bytes, on_drop: Callable[[], None]) -> None:
        """`on_drop`: called when the body is dropped while it comes in."""
        self.caller = caller
        self.on_drop = on_drop
        self.bytes = 0
        self.arrived_s = 0.0
        """Time of its last bytes, by the loop's clock, seconds."""
        self.dropped = False


class BodyPool:
    """A bound of the bytes of all bodies, and of one caller's. Used from one event loop."""

    def __init__(self, bytes_max: int, caller_bytes_max: int, full: str = FULL) -> None:
        """`full`: error message for a caller whose body has no room."""
        self._bytes_max = bytes_max
        self._caller_bytes_max = caller_bytes_max
        self._full = full
        self._by_caller: dict[bytes, int] = {}
        self._incoming: dict[bytes, OrderedDict[PooledBody, None]] = {}
        """Bodies that are not whole, by caller, the one that waits longest for bytes first."""
        self.bytes = 0

    def overloaded(self) -> Overloaded:
        return Overloaded(self._full, RETRY_AFTER_S)

    def take(self, body: PooledBody, more: int) -> None:
        """Count `more` bytes of a body that comes in. Raises Overloaded."""
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
        """Note that the body is whole: it can no longer be dropped. Idempotent."""
        incoming = self._incoming.get(body.caller)
        if incoming is not None and body in incoming:
            del incoming[body]
            if not incoming:
                del self._incoming[body.caller]

    def release(self, body: PooledBody) -> None:
        """Give the body's bytes back: its texts are no longer needed. Idempotent."""
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
        """Return the other body of the same caller that has stalled longest, or None."""
        oldest = next((each for each in self._incoming.get(body.caller, ()) if each is not body), None)
        if oldest is None or now_s - oldest.arrived_s < STALLED_S:
            return None
        return oldest

    def _largest_callers_body(self, own: int) -> PooledBody | None:
        """Return a body of the caller that has most bytes, or None if that is not more than `own` bytes."""
        largest = max(self._incoming, key=self._by_caller.__getitem__, default=None)
        if largest is None or self._by_caller[largest] <= own:
            return None
        return next(iter(self._incoming[largest]))


class IncomingBody:
    """One body's shares of two pools: of its first bytes, and of the rest (`bounded-admission`)."""

    def __init__(self, caller: bytes, beginnings: BodyPool, rests: BodyPool, beginning_bytes: int) -> None:
        """`beginning_bytes`: bytes of the body that count in `beginnings`."""
        self._pools = beginnings, rests
        self._shares = PooledBody(caller, self._drop), PooledBody(caller, self._drop)
        self._beginning_bytes = beginning_bytes
        self._deadline: asyncio.Timeout | None = None
        self.size = 0
        """Bytes that came so far."""
        self.is_whole = False

    @property
    def was_dropped(self) -> bool:
        """Whether the body had to make room for others."""
        return any(share.dropped for share in self._shares)

    def begin(self, deadline: asyncio.Timeout) -> None:
        """`deadline`: bound of the reading, which expires at once when the body is dropped."""
        self._deadline = deadline

    def grow(self, more: int) -> None:
        """Count `more` bytes. Raises Overloaded."""
        if self.was_dropped:
            raise self.overloaded()
        first = min(more, max(self._beginning_bytes - self.size, 0))
        self.size += more
        for pool, share, part in zip(self._pools, self._shares, (first, more - first), strict=True):
            if part:
                pool.take(share, part)

    def finish(self) -> None:
        """Note that the body is whole."""
        self.is_whole = True
        for pool, share in zip(self._pools, self._shares, strict=True):
            pool.finish(share)

    def release(self) -> None:
        """Give its bytes back: its texts are no longer needed."""
        for pool, share in zip(self._pools, self._shares, strict=True):
            pool.release(share)

    def overloaded(self) -> Overloaded:
        """The error of a body that was dropped."""
        return self._pools[0].overloaded()

    def _drop(self) -> None:
        self.release()
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())
