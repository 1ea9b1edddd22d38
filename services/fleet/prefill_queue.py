"""When will a prefill worker have computed what waits there, and a prompt that is placed on it now?

It says how many tokens it has yet to compute, and how many it computes in a second, with each renewal of its
lease and whenever a room on it ends. What was placed since is counted here (`placed-by-use`). From that
follows a time at which it is done, if it goes on as it did: what is placed later begins behind that.

It is an estimate. A worker that waits for a destination computes nothing meanwhile; what its cache spares it
is known to itself alone, and a room that its decode worker computes itself leaves the queue uncomputed. Its
next word puts all that right.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from baton.fleet.worker_usage import UnreportedRooms
from baton.ids import RoomId
from baton.rooms.worker_load import WorkerLoad

LEFT_MS_MAX: Final = 2**32 - 1
"""More is told as this, which is seven weeks."""


@dataclass(slots=True)
class PrefillQueue:
    """Of one worker."""

    load: WorkerLoad | None = None
    """What it said last."""
    since: UnreportedRooms = field(default_factory=UnreportedRooms)
    """Rooms, by the tokens that are to be computed of each."""
    _done_ms: int = 0
    """When all is computed of which is known here."""

    @property
    def tokens(self) -> int:
        """That are to be computed: as it said, and of what was placed since."""
        return self.since.tokens + (0 if self.load is None else self.load.tokens_waiting)

    @property
    def tokens_per_s(self) -> int:
        """0: not known."""
        return 0 if self.load is None else self.load.tokens_per_s

    def left_ms(self, now_ms: int) -> int | None:
        """How long it will take to compute all that is there and all that was placed since; None where it is
        not known."""
        left_ms = self._done_ms - now_ms
        return min(max(left_ms, 0), LEFT_MS_MAX) if self.tokens_per_s else None

    def cost(self, tokens: int, scored: int) -> int:
        """Tokens that cost as much as so many, of which some are scored, by the worker's own word
        (`counted-work`)."""
        return tokens if self.load is None else tokens + scored * self.load.score_price // 1000

    def place(self, room: RoomId, tokens: int, now_ms: int) -> None:
        """It is about to get a room, issued now, of which so many tokens are to be computed: by `cost`."""
        self.since.place(room, tokens)
        self._done_ms = max(self._done_ms, now_ms) + self.takes_ms(tokens)

    def brought(self, room: RoomId) -> int:
        """The room's opener brought it. Returns by how many tokens less is to be computed by that."""
        tokens = self.since.brought(room)
        self._done_ms -= self.takes_ms(tokens)
        return tokens

    def gone(self, room: RoomId) -> None:
        """It holds nothing of the room."""
        self._done_ms -= self.takes_ms(self.since.gone(room))

    def hear(
        self, load: WorkerLoad, entered: RoomId, is_brought: Callable[[RoomId], bool], now_ms: int
    ) -> None:
        """What it says. The rest as of `WorkerUsage.hear`."""
        if self.load is not None and load.number <= self.load.number:
            return
        self.load = load
        self.since.entered(entered, is_brought)
        self._done_ms = now_ms + self.takes_ms(load.tokens_waiting + self.since.tokens)

    def takes_ms(self, tokens: int) -> int:
        """To compute so many tokens; 0 where it is not known."""
        return tokens * 1000 // self.tokens_per_s if self.tokens_per_s else 0
