"""Rate limit by caller: one token bucket each, which holds one second's worth.

A bucket is stored as the time at which it will be full. Only the callers that asked last are remembered: a
forgotten one starts full, in its favour.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

CALLERS_MAX: Final = 10_000


class RateLimit:
    """The buckets of all callers. Used from one event loop."""

    def __init__(self, per_second: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = 1 / per_second
        self._holds_s = 1.0
        self._now_s = now_s
        self._full_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        """Number of callers that are remembered."""
        return len(self._full_s)

    def take(self, caller: bytes) -> float:
        """Count a request and return 0, or return the seconds until the caller may send one, and count
        nothing."""
        now_s = self._now_s()
        full_s = max(self._full_s.get(caller, now_s), now_s) + self._every_s
        too_soon_s = full_s - now_s - self._holds_s
        if too_soon_s > self._every_s / 2**20:  # rounding
            return too_soon_s
        self._full_s[caller] = full_s
        self._full_s.move_to_end(caller)
        if len(self._full_s) > CALLERS_MAX:
            self._full_s.popitem(last=False)
        return 0.0
