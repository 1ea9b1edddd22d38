"""How long to wait before something that died is started again?"""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """None the first time; then it doubles from `first_ms` to `most_ms`. It starts over after a run of at
    least `stable_ms`: what had run well is wanted back at once."""

    first_ms: int = 500
    most_ms: int = 30_000
    stable_ms: int = 10_000
    _next_ms: int = 0

    def next_ms(self, ran_ms: int) -> int:
        """The wait after a run that lasted `ran_ms`, in milliseconds."""
        wait_ms = 0 if ran_ms >= self.stable_ms else self._next_ms
        self._next_ms = min(self.most_ms, max(self.first_ms, wait_ms * 2))
        return wait_ms


def describe_wait(wait_ms: int) -> str:
    """`at once`, `in 0.5 s`."""
    return f"in {wait_ms / 1000:g} s" if wait_ms else "at once"
