"""How is something told that strangers can make happen at will? Once in a while, with how often it happened.

For log lines that nobody may fill a disk with.
"""

import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 10.0


class LogThrottle:
    """Of one kind of line."""

    def __init__(self, every_s: float = EVERY_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now_s = now_s
        self._told_s: float | None = None
        self._times = 0

    def happened(self, times: int = 1) -> int:
        """How often it happened since it was told last, if it is to be told now; else 0."""
        self._times += times
        now_s = self._now_s()
        if self._told_s is not None and now_s - self._told_s < self._every_s:
            return 0
        self._told_s, told = now_s, self._times
        self._times = 0
        return told
