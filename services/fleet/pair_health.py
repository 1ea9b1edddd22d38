"""Pairs of workers that do not reach each other, though each may serve with others.

A worker is ready after a hand-over with one partner, which proves nothing about its connection to another. A
pair whose rooms fail to connect, several in a row, is broken until a canary has passed through that very
pair.
"""

from typing import Final, TypeAlias

from baton.ids import Incarnation
from baton.rooms.errors import Cause, Reason

BROKEN_AFTER: Final = 3
"""Consecutive rooms of a pair that fail to connect before the pair is broken."""

PairId: TypeAlias = tuple[Incarnation, Incarnation]
"""Incarnations of a prefill and a decode worker."""


class PairHealth:
    """Broken pairs, and failures of pairs. Bounded by the pairs of registered workers: those of a worker that
    leaves are forgotten."""

    def __init__(self) -> None:
        self.failures: dict[PairId, int] = {}
        """Consecutive failures to connect, for pairs with at least one."""
        self._broken: dict[PairId, None] = {}

    def ended(self, pair: PairId, cause: Cause | None, *, canary: bool) -> bool:
        """Note how a room of the pair ended: `cause` is None if it was answered. Return whether that broke or
        mended the pair."""
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
        """Return broken pairs, the longest broken first."""
        return list(self._broken)

    def broken_count(self) -> int:
        return len(self._broken)

    def forget(self, worker: Incarnation) -> None:
        """Forget all pairs of a worker that is gone. No other worker gets its incarnation."""
        for pair in [each for each in self.failures if worker in each]:
            del self.failures[pair]
            self._broken.pop(pair, None)
