"""Time as a process on a machine with a poor clock sees it."""

from tests.sim.loop import VirtualLoop

STARTED_MS = 1_700_000_000_000


class SkewedClock:
    """`baton.runtime.clock.Clock`: the monotonic reading runs too fast or slow, the wall one is off."""

    def __init__(self, loop: VirtualLoop, start_ms: int = 0, drift: float = 0.0, skew_ms: int = 0) -> None:
        self._loop = loop
        self._start_ms = start_ms
        self._rate = 1000.0 * (1.0 + drift)
        self._skew_ms = skew_ms

    def now_ms(self) -> int:
        return self._start_ms + int(self._loop.time() * self._rate)

    def wall_ms(self) -> int:
        return STARTED_MS + self._skew_ms + int(self._loop.time() * 1000)

    def host_us(self) -> int:
        return int(self._loop.time() * 1_000_000)
