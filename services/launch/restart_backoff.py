"""Back-off between the restarts of a process that keeps ending."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Wait before each restart. The first restart comes at once, then waits double from `first_ms` to
    `most_ms`.

    After a run of at least `stable_ms` milliseconds, the next restart comes at once again.
    """

    first_ms: int = 500
    most_ms: int = 30_000
    stable_ms: int = 10_000
    _next_ms: int = 0

    def next_ms(self, ran_ms: int) -> int:
        """Return the wait before the next restart, in milliseconds, after a run of `ran_ms` milliseconds."""
        wait_ms = 0 if ran_ms >= self.stable_ms else self._next_ms
        self._next_ms = min(self.most_ms, max(self.first_ms, wait_ms * 2))
        return wait_ms


def describe_wait(wait_ms: int) -> str:
    """Return a wait as text: `at once`, `in 0.5 s`."""
    return f"in {wait_ms / 1000:g} s" if wait_ms else "at once"
