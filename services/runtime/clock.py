"""Clocks, passed as arguments so that tests and simulations can set the time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Three clocks that are never mixed: durations and deadlines use `now_ms`, logs use `wall_ms`."""

    def now_ms(self) -> int:
        """Return milliseconds since an arbitrary start. It never goes back. Other processes cannot compare
        it.
        """

    def wall_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC. It may jump, so it is for people and never for
        deadlines."""

    def host_us(self) -> int:
        """Return microseconds since the host's start. It never goes back.

        All processes of a host share it, so that times measured in two of them can be compared.
        """


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def host_us(self) -> int:
        return time.monotonic_ns() // 1_000
