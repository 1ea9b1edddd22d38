"""Usage of a worker's KV cache: its last report, and the rooms placed since (`placed-by-use`).

A worker reports with each renewal of its lease, and whenever a room on it ends. Prefill reports tokens to
compute (`baton.fleet.prefill_queue`), decode reports pages, which this module counts. A report covers all
rooms that the worker has entered. Rooms placed since are counted here, by the positions with which they
begin. Without a report, all open rooms are counted like that.

A report may be as old as two renewals, and rooms on the worker grow meanwhile. In the worst case a room is
placed that does not fit any more. That is harmless: it waits on the worker for pages, and no running room is
retracted for it. The next report shows it waiting, so that no further rooms are placed there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from baton.ids import RoomId
from baton.rooms.worker_load import WorkerLoad

WAITING_MIN: Final = 2
WAITING_SHARE: Final = 8
"""Divisor for the number of rooms that may wait on a worker: one for every 8 running sequences, and at least
WAITING_MIN.

They get their pages, or join the batch, in the turn in which another room ends, so the worker does not idle.
If more rooms end at one time, the worker reports that at once, and the next rooms are placed.
"""


@dataclass(slots=True)
class UnreportedRooms:
    """Rooms placed on a worker that its last report does not cover, each with a count of tokens. Each room is
    examined twice at most, however many reports come."""

    tokens: int = 0
    """Sum of the token counts of all rooms that the worker's last report does not cover."""
    _since: dict[RoomId, int] = field(default_factory=dict)
    """Token counts by room, in the order of the room ids."""
    _late: dict[RoomId, int] = field(default_factory=dict)
    """Rooms that the worker may not have got yet, although it has got rooms with higher ids. The value is the
    room's number of KV positions (or tokens to compute)."""

    def __len__(self) -> int:
        return len(self._since) + len(self._late)

    def add(self, room: RoomId, tokens: int) -> None:
        """Count a room that was just placed on the worker. `tokens`: KV positions with which it begins, or
        tokens to compute."""
        self._since[room] = tokens
        self.tokens += tokens

    def delivered(self, room: RoomId) -> int:
        """Record that the worker has got a room. Return the number of tokens that no longer counts for it: 0,
        unless the worker has already reported rooms with higher ids."""
        return self._count_out(self._late, room)

    def release(self, room: RoomId) -> int:
        """Remove a room that has left the worker. Return the number of tokens that no longer counts for it.
        If the worker had got the room, its next report shows the free space."""
        return self._count_out(self._since, room) + self._count_out(self._late, room)

    def entered(self, entered: RoomId, is_brought: Callable[[RoomId], bool]) -> None:
        """Remove the rooms that the worker's report covers. They have ids up to `entered`, and `is_brought`
        returns that the worker has got them."""
        for room in list(takewhile(lambda room: room <= entered, self._since)):
            tokens = self._since.pop(room)
            if is_brought(room):
                self.tokens -= tokens
            else:
                self._late[room] = tokens

    def _count_out(self, rooms: dict[RoomId, int], room: RoomId) -> int:
        tokens = rooms.pop(room, 0)
        self.tokens -= tokens
        return tokens


@dataclass(slots=True)
class WorkerUsage:
    """Free and used KV positions of one worker's cache."""

    tokens_max: int
    """Number of KV positions in the worker's whole cache."""
    page_tokens: Sequence[int]
    """Number of tokens per page, by KV group. One group with pages of one token if the worker did not
    register any."""
    load: WorkerLoad | None = None
    """Last report of its load that the worker has sent. None before the first."""
    _free: int = field(init=False)
    """Number of KV positions that were free at the last report and that no waiting room needed. May be
    negative."""
    unreported: UnreportedRooms = field(default_factory=UnreportedRooms)
    """Rooms placed on the worker since its last report, with the number of KV positions with which each
    begins."""

    def __post_init__(self) -> None:
        self._free = self.tokens_max

    def fits(self, load: WorkerLoad) -> bool:
        """Return whether a load report has the right number of KV groups."""
        return len(load.free) == len(load.requested) == len(self.page_tokens)

    @property
    def left(self) -> int:
        """Number of KV positions with which another room could begin on the worker. Negative if waiting rooms
        need more than is free."""
        return self._free - self.unreported.tokens

    @property
    def tokens(self) -> int:
        """Number of KV positions that are used, reserved for running rooms, or needed by waiting rooms."""
        return self.tokens_max - self.left

    @property
    def growing(self) -> int:
        """Number of sequences on the worker whose KV grows with each sampled token, once all rooms placed on
        it run."""
        load = self.load
        return len(self.unreported) if load is None else load.running + load.waiting + len(self.unreported)

    @property
    def waiting(self) -> int:
        """Number of rooms on the worker that may be unable to begin. They are those that its last report says
        wait, and all rooms placed on it since."""
        load = self.load
        if load is None:
            return len(self.unreported)
        beyond = max(load.running - load.running_max, 0) * bool(load.running_max)
        return load.waiting + beyond + len(self.unreported)

    @property
    def accepts_waiting(self) -> bool:
        """Whether one more room that cannot begin yet may be placed on the worker. Always true before its
        first report."""
        load = self.load
        return load is None or self.waiting < max(WAITING_MIN, load.running // WAITING_SHARE)

    @property
    def has_batch_space(self) -> bool:
        """Whether the worker can run one more sequence in its batch, in addition to those of all rooms placed
        on it."""
        load = self.load
        if load is None or not load.running_max:
            return True
        return self.growing < load.running_max

    def can_start(self, tokens: int) -> bool:
        """Return whether a room that begins with `tokens` KV positions could begin on the worker now."""
        return self.left >= tokens and self.has_batch_space

    def update(self, load: WorkerLoad, entered: RoomId, is_brought: Callable[[RoomId], bool]) -> bool:
        """Process the worker's report of its load. Return whether the worker has more space than was assumed
        before. A report older than the last one is ignored.

        `entered`: highest id among the rooms that the worker has got from this router. `is_brought`: function
        that returns whether the worker has got a room.
        """
        if self.load is not None and load.number <= self.load.number:
            return False
        before = self.left, self.accepts_waiting, self.has_batch_space
        pages = zip(load.free, load.requested, self.page_tokens, strict=True)
        self.load, self._free = load, min((free - requested) * size for free, requested, size in pages)
        self.unreported.entered(entered, is_brought)
        now = self.left, self.accepts_waiting, self.has_batch_space
        return any(more > less for more, less in zip(now, before, strict=True))
