"""Rate limit for log lines that clients can cause at will, so that they cannot fill a disk."""

import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 10.0


class LogThrottle:
    """Rate limit for one kind of log line: at most one line in `every_s` seconds."""

    def __init__(self, every_s: float = EVERY_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now_s = now_s
        self._logged_s: float | None = None
        self._times = 0

    def count(self, times: int = 1) -> int:
        """Count `times` events. If a log line is due now, return the number of events since the last line,
        else 0."""
        self._times += times
        now_s = self._now_s()
        if self._logged_s is not None and now_s - self._logged_s < self._every_s:
            return 0
        self._logged_s, logged = now_s, self._times
        self._times = 0
        return logged
