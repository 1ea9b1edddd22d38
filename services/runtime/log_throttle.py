"""Rate limit for log lines that clients can cause at will, so that they cannot fill a disk."""

import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 10.0


class LogThrottle:
    """Rate limit of one kind of line."""

    def __init__(self, every_s: float = EVERY_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now_s = now_s
        self._logged_s: float | None = None
        self._times = 0

    def count(self, times: int = 1) -> int:
        """Count `times` events. Return their number since the last line if a line is due now, else 0."""
        self._times += times
        now_s = self._now_s()
        if self._logged_s is not None and now_s - self._logged_s < self._every_s:
            return 0
        self._logged_s, logged = now_s, self._times
        self._times = 0
        return logged
