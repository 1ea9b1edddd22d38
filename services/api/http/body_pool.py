"""Memory for request bodies, shared out among callers.

A body counts from its first byte until its texts are no longer needed. When the pool is full, a body that is
still coming in makes room: one of the caller that has most, so that no caller shuts another out. Among the
bodies of one caller a newer one takes the place of one that has stalled, and of no other
(`bounded-admission`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from baton.api.backend import Overloaded

STALLED_S: Final = 1.0
"""A body of which nothing came for so long makes room for others of its caller."""
RETRY_AFTER_S: Final = 1
FULL: Final = "too many requests are being read"


class PooledBody:
    """One body's share of a pool."""

    __slots__ = ("arrived_s", "bytes", "caller", "dropped", "on_drop")

    def __init__(self, caller: bytes, on_drop: Callable[[], None]) -> None:
        """`on_drop`: called if the body has to make room while it comes in."""
        self.caller = caller
        self.on_drop = on_drop
        self.bytes = 0
        self.arrived_s = 0.0
        """When its last bytes came, by the loop's clock, seconds."""
        self.dropped = False


class BodyPool:
    """Used from one event loop."""

    def __init__(self, bytes_max: int, caller_bytes_max: int, full: str = FULL) -> None:
        """`full`: what a caller reads whose body has no room."""
        self._bytes_max = bytes_max
        self._caller_bytes_max = caller_bytes_max
        self._full = full
        self._by_caller: dict[bytes, int] = {}
        self._incoming: dict[bytes, OrderedDict[PooledBody, None]] = {}
        """Bodies that are not whole, by caller. The one of which nothing came for longest is first."""
        self.bytes = 0

    def overloaded(self) -> Overloaded:
        return Overloaded(self._full, RETRY_AFTER_S)

    def take(self, body: PooledBody, more: int) -> None:
        """Count `more` bytes of a body that comes in. Raises Overloaded."""
        now_s = asyncio.get_running_loop().time()
        while (own := self._by_caller.get(body.caller, 0) + more) > self._caller_bytes_max:
            self._drop(self._stalled(body, now_s))
        while self.bytes + more > self._bytes_max:
            self._drop(self._of_the_largest(own) or self._stalled(body, now_s))
        self._add(body, more)
        body.arrived_s = now_s
        incoming = self._incoming.setdefault(body.caller, OrderedDict())
        incoming[body] = None
        incoming.move_to_end(body)

    def finish(self, body: PooledBody) -> None:
        """The body is whole, and makes room for no other. Idempotent."""
        incoming = self._incoming.get(body.caller)
        if incoming is not None and body in incoming:
            del incoming[body]
            if not incoming:
                del self._incoming[body.caller]

    def release(self, body: PooledBody) -> None:
        """The body's texts are no longer needed. Idempotent."""
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
        """The caller's own body that has stalled for longest."""
        oldest = next(iter(self._incoming.get(body.caller, ())), None)
        if oldest is None or oldest is body or now_s - oldest.arrived_s < STALLED_S:
            return None
        return oldest

    def _of_the_largest(self, own: int) -> PooledBody | None:
        """A body of the caller that has most, if that is more than `own` bytes."""
        largest = max(self._incoming, key=self._by_caller.__getitem__, default=None)
        if largest is None or self._by_caller[largest] <= own:
            return None
        return next(iter(self._incoming[largest]))
