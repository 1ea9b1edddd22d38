"""Clock whose time a test sets."""


class ManualClock:
    """Time that moves only when told to."""

    def __init__(self, now_ms: int = 0, wall_ms: int = 0) -> None:
        self._now_ms = now_ms
        self._wall_ms = wall_ms

    def now_ms(self) -> int:
        return self._now_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def host_us(self) -> int:
        return self._now_ms * 1_000

    def advance(self, ms: int) -> None:
        """Let `ms` milliseconds pass on both readings. Raises ValueError if `ms` is negative."""
        if ms < 0:
            raise ValueError(f"time does not go back ({ms} ms)")
        self._now_ms += ms
        self._wall_ms += ms
