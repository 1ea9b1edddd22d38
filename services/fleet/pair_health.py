"""Which pairs of workers do not reach each other, though each may serve with others?

A worker is ready by a hand-over with one partner. That says nothing of its way to another: a pair whose rooms
fail to connect, one after the other, is broken until a canary has passed through that very pair.
"""

from typing import Final, TypeAlias

from baton.ids import Incarnation
from baton.rooms.errors import Cause, Reason

BROKEN_AFTER: Final = 3
"""Rooms of a pair that fail to connect, with none between them that was answered."""

PairId: TypeAlias = tuple[Incarnation, Incarnation]
"""Of a prefill and a decode worker."""


class PairHealth:
    """Bounded by the pairs of workers that there are: those of a worker that leaves are forgotten."""

    def __init__(self) -> None:
        self._failures: dict[PairId, int] = {}
        """How many rooms in a row failed to connect, of pairs of which one did."""
        self._broken: dict[PairId, None] = {}

    def ended(self, pair: PairId, cause: Cause | None, *, canary: bool) -> bool:
        """A room of the pair ended; `cause` is None where it was answered. True when that broke the pair, or
        mended it."""
        before = self.is_broken(pair)
        if cause is None and (canary or not before):
            self._failures.pop(pair, None)
            self._broken.pop(pair, None)
        elif cause is not None and cause.reason is Reason.CONNECT_FAILED:
            self._failures[pair] = min(self._failures.get(pair, 0) + 1, BROKEN_AFTER)
            if self._failures[pair] == BROKEN_AFTER:
                self._broken.setdefault(pair)
        return self.is_broken(pair) is not before

    def is_broken(self, pair: PairId) -> bool:
        return pair in self._broken

    def broken(self) -> list[PairId]:
        """Longest broken first."""
        return list(self._broken)

    def broken_count(self) -> int:
        return len(self._broken)

    def forget(self, worker: Incarnation) -> None:
        """It is gone, and no other has its incarnation."""
        for pair in [each for each in self._failures if worker in each]:
            del self._failures[pair]
            self._broken.pop(pair, None)
