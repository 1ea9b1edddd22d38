"""May this caller ask once more, now?

A bucket for each caller that fills at the rate and holds one second's worth. Of a bucket only the time at
which it will be full is kept, and those of the callers that asked last: one that is forgotten starts full,
which favours it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

CALLERS_MAX: Final = 10_000


class RateLimit:
    """Used from one event loop."""

    def __init__(self, per_second: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = 1 / per_second
        self._holds_s = 1.0
        self._now_s = now_s
        self._full_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        """Callers that are remembered."""
        return len(self._full_s)

    def take(self, caller: bytes) -> float:
        """0 if it may, which counts; else the seconds until it may, and nothing is counted."""
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
