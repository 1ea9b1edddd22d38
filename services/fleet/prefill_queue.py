"""Estimate of when a prefill worker will have computed what waits there.

The worker reports how many tokens it has yet to compute, and how many it computes in a second. It reports
with each renewal of its lease, and whenever a room on it ends. Rooms placed since the last report are counted
here (`placed-by-use`). From both follows a time at which all is computed, and a room that is placed later
begins after that.

The estimate ignores three things: waits for a destination, tokens that the worker's cache spares, and rooms
that decode computes after all. The next report corrects it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from baton.fleet.worker_usage import UnreportedRooms
from baton.ids import RoomId
from baton.rooms.worker_load import WorkerLoad

LEFT_MS_MAX: Final = 2**32 - 1
"""Largest estimate that is sent, seven weeks."""


@dataclass(slots=True)
class PrefillQueue:
    """Prompt tokens that wait at one prefill worker."""

    load: WorkerLoad | None = None
    """Last report of the worker."""
    unreported: UnreportedRooms = field(default_factory=UnreportedRooms)
    """Rooms placed since then, by their tokens to compute."""
    _done_ms: int = 0
    """Time when all known tokens are computed, in milliseconds."""

    @property
    def tokens(self) -> int:
        """Tokens to compute: those reported, and those of rooms placed since."""
        return self.unreported.tokens + (0 if self.load is None else self.load.tokens_waiting)

    @property
    def tokens_per_s(self) -> int:
        """Prompt tokens computed in a second; 0 if unknown."""
        return 0 if self.load is None else self.load.tokens_per_s

    def left_ms(self, now_ms: int) -> int | None:
        """Return how long it takes to compute all that waits, in milliseconds. None if the rate is
        unknown."""
        left_ms = self._done_ms - now_ms
        return min(max(left_ms, 0), LEFT_MS_MAX) if self.tokens_per_s else None

    def cost(self, tokens: int, scored: int) -> int:
        """Return the cost of a prompt in plain tokens, of which `scored` tokens are scored, too. The price of
        scoring is the worker's own (`counted-work`)."""
        return tokens if self.load is None else tokens + scored * self.load.score_price // 1000

    def add(self, room: RoomId, tokens: int, now_ms: int) -> None:
        """Add a room that was just issued. `tokens`: its cost as returned by `cost`."""
        self.unreported.add(room, tokens)
        self._done_ms = max(self._done_ms, now_ms) + self.duration_ms(tokens)

    def delivered(self, room: RoomId) -> int:
        """Note that the worker got a room from its opener. Return the tokens that are no longer counted for
        it."""
        tokens = self.unreported.delivered(room)
        self._done_ms -= self.duration_ms(tokens)
        return tokens

    def release(self, room: RoomId) -> None:
        """Remove a room that the worker no longer holds."""
        self._done_ms -= self.duration_ms(self.unreported.release(room))

    def update(
        self, load: WorkerLoad, entered: RoomId, is_brought: Callable[[RoomId], bool], now_ms: int
    ) -> None:
        """Take a report of the worker. See `WorkerUsage.update`."""
        if self.load is not None and load.number <= self.load.number:
            return
        self.load = load
        self.unreported.entered(entered, is_brought)
        self._done_ms = now_ms + self.duration_ms(load.tokens_waiting + self.unreported.tokens)

    def duration_ms(self, tokens: int) -> int:
        """Return the time to compute `tokens`, in milliseconds; 0 if the rate is unknown."""
        return tokens * 1000 // self.tokens_per_s if self.tokens_per_s else 0
