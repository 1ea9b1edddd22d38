"""How long to wait before something that died is started again?"""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Doubles from `first_ms` to `most_ms`; starts over after a run of at least `stable_ms`."""

    first_ms: int = 500
    most_ms: int = 30_000
    stable_ms: int = 60_000
    _next_ms: int = 0

    def next_ms(self, ran_ms: int) -> int:
        """The wait after a run that lasted `ran_ms`, in milliseconds."""
        if ran_ms >= self.stable_ms or self._next_ms == 0:
            self._next_ms = self.first_ms
        wait_ms = self._next_ms
        self._next_ms = min(self.most_ms, wait_ms * 2)
        return wait_ms
