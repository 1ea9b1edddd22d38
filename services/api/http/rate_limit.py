"""Rate limit by caller: each caller has a token bucket that holds one second's worth of requests.

A bucket is stored as the time at which it will be full again. Only the callers with the most recent requests
are remembered. A forgotten caller starts with a full bucket, so it may send requests at once.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

CALLERS_MAX: Final = 10_000


class RateLimit:
    """Token buckets of all callers. Used from one event loop."""

    def __init__(self, per_second: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = 1 / per_second
        self._holds_s = 1.0
        self._now_s = now_s
        self._full_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of callers whose token buckets are stored."""
        return len(self._full_s)

    def take(self, caller: bytes) -> float:
        """Count a request of `caller` and return 0. If the limit is reached, count nothing and return the
        seconds until the caller may send the next request."""
        now_s = self._now_s()
        full_s = max(self._full_s.get(caller, now_s), now_s) + self._every_s
        too_soon_s = full_s - now_s - self._holds_s
        if too_soon_s > self._every_s / 2**20:  # tolerates rounding
            return too_soon_s
        self._full_s[caller] = full_s
        self._full_s.move_to_end(caller)
        if len(self._full_s) > CALLERS_MAX:
            self._full_s.popitem(last=False)
        return 0.0
