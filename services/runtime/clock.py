"""Clocks. They are passed as arguments, so that tests and simulations can set the time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of three times that are never mixed: monotonic, wall-clock, and shared by all processes of a
    host.

    Durations and deadlines use `now_ms`. Logs use `wall_ms`.
    """

    def now_ms(self) -> int:
        """Return milliseconds since an arbitrary start. The time never goes back.

        It cannot be compared with the time of another process.
        """

    def wall_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC. The time may jump, so it is for display and never for
        deadlines."""

    def host_us(self) -> int:
        """Return microseconds since the host's start. The time never goes back.

        All processes of a host share it, so that times measured in two of them can be compared.
        """


class SystemClock:
    """Clock of the operating system."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def host_us(self) -> int:
        return time.monotonic_ns() // 1_000
