"""Health of pairs of workers: which prefill and decode workers cannot connect to each other.

A worker is ready after a hand-over with one partner. That proves nothing about its connection to another
worker. A pair whose rooms fail to connect several times in a row counts as broken. It counts as whole again
after a canary (test request) has passed through this very pair.
"""

from typing import Final, TypeAlias

from baton.ids import Incarnation
from baton.rooms.errors import Cause, Reason

BROKEN_AFTER: Final = 3
"""Number of consecutive rooms that fail to connect before their pair of workers counts as broken."""

PairId: TypeAlias = tuple[Incarnation, Incarnation]
"""Id of a pair of workers: the incarnations of the prefill and the decode worker."""


class PairHealth:
    """Broken pairs of workers, and the failures of each pair. Bounded by the pairs of registered workers: the
    pairs of a worker that leaves are forgotten."""

    def __init__(self) -> None:
        self.failures: dict[PairId, int] = {}
        """Number of rooms in a row that failed to connect, by pair. Pairs without failures have no entry."""
        self._broken: dict[PairId, None] = {}

    def ended(self, pair: PairId, cause: Cause | None, *, canary: bool) -> bool:
        """Record how a room of the pair ended. `cause`: None if the request was answered. Return whether the
        pair became broken, or whole again."""
        before = self.is_broken(pair)
        if cause is None and (canary or not before):
            self.failures.pop(pair, None)
            self._broken.pop(pair, None)
        elif cause is not None and cause.reason is Reason.CONNECT_FAILED:
            self.failures[pair] = min(self.failures.get(pair, 0) + 1, BROKEN_AFTER)
            if self.failures[pair] == BROKEN_AFTER:
                self._broken.setdefault(pair)
        return self.is_broken(pair) is not before

    def is_broken(self, pair: PairId) -> bool:
        return pair in self._broken

    def broken(self) -> list[PairId]:
        """Return the broken pairs, the longest broken first."""
        return list(self._broken)

    def broken_count(self) -> int:
        return len(self._broken)

    def forget(self, worker: Incarnation) -> None:
        """Forget all pairs of a worker that has left. No other worker gets its incarnation."""
        for pair in [each for each in self.failures if worker in each]:
            del self.failures[pair]
            self._broken.pop(pair, None)
