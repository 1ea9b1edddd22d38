"""What time is it? Injected, so that tests and simulations decide."""

import time
from typing import Protocol


class Clock(Protocol):
    """Readings that are never mixed: durations and deadlines use `now_ms`, logs use `wall_ms`."""

    def now_ms(self) -> int:
        """Milliseconds since an arbitrary start; never goes back. Meaningless to other processes."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may jump. For people, never for deadlines."""

    def host_us(self) -> int:
        """Microseconds since the host's start; never goes back. The same for all processes of a host, so
        that what was measured in two of them can be compared."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def host_us(self) -> int:
        return time.monotonic_ns() // 1_000
