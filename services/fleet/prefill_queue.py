"""Estimate of when a prefill worker will have computed all prompts that wait there.

The worker reports how many tokens it has yet to compute, and how many it computes in a second. It reports
with each renewal of its lease, and whenever a room on it ends. Rooms placed since the last report are counted
here (`placed-by-use`). From both follows a time at which all of them are computed. A room that is placed
later begins after that.

The estimate ignores three things: waits for a destination, tokens that are cached on the worker, and rooms
whose prompt decode computes after all. The next report corrects it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from baton.fleet.worker_usage import UnreportedRooms
from baton.ids import RoomId
from baton.rooms.worker_load import WorkerLoad

LEFT_MS_MAX: Final = 2**32 - 1
"""Largest estimate that is sent to a decode worker, in milliseconds: seven weeks."""


@dataclass(slots=True)
class PrefillQueue:
    """Estimate of the prompt tokens that wait on one prefill worker, and of the time until they are
    computed."""

    load: WorkerLoad | None = None
    """Last load report of the worker; None before the first."""
    unreported: UnreportedRooms = field(default_factory=UnreportedRooms)
    """Rooms placed on the worker since its last report, with the number of tokens to compute of each."""
    _done_ms: int = 0
    """Time in milliseconds at which the worker is expected to have computed all tokens that wait there."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the worker has yet to compute: those it reported, and those of rooms placed
        since."""
        return self.unreported.tokens + (0 if self.load is None else self.load.tokens_waiting)

    @property
    def tokens_per_s(self) -> int:
        """Number of prompt tokens that the worker computes in a second; 0 if unknown."""
        return 0 if self.load is None else self.load.tokens_per_s

    def left_ms(self, now_ms: int) -> int | None:
        """Return how long the worker takes to compute all prompts that wait there, in milliseconds. None if
        its rate is unknown."""
        left_ms = self._done_ms - now_ms
        return min(max(left_ms, 0), LEFT_MS_MAX) if self.tokens_per_s else None

    def cost(self, tokens: int, scored: int) -> int:
        """Return the cost of a prompt of `tokens` tokens, of which `scored` are scored, too, as a number of
        plain tokens. The price of scoring is the one that the worker reported (`counted-work`)."""
        return tokens if self.load is None else tokens + scored * self.load.score_price // 1000

    def add(self, room: RoomId, tokens: int, now_ms: int) -> None:
        """Count a room that was just placed on the worker. `tokens`: its cost as returned by `cost`."""
        self.unreported.add(room, tokens)
        self._done_ms = max(self._done_ms, now_ms) + self.duration_ms(tokens)

    def delivered(self, room: RoomId) -> int:
        """Record that the worker has got a room. Return the number of tokens that no longer counts for it: 0,
        unless the worker has already reported rooms with higher ids."""
        tokens = self.unreported.delivered(room)
        self._done_ms -= self.duration_ms(tokens)
        return tokens

    def release(self, room: RoomId) -> None:
        """Remove a room that the worker no longer holds."""
        self._done_ms -= self.duration_ms(self.unreported.release(room))

    def update(
        self, load: WorkerLoad, entered: RoomId, is_brought: Callable[[RoomId], bool], now_ms: int
    ) -> None:
        """Process the worker's report of its load. Arguments: see `WorkerUsage.update`."""
        if self.load is not None and load.number <= self.load.number:
            return
        self.load = load
        self.unreported.entered(entered, is_brought)
        self._done_ms = now_ms + self.duration_ms(load.tokens_waiting + self.unreported.tokens)

    def duration_ms(self, tokens: int) -> int:
        """Return the time that the worker takes to compute `tokens` tokens, in milliseconds; 0 if its rate is
        unknown."""
        return tokens * 1000 // self.tokens_per_s if self.tokens_per_s else 0
