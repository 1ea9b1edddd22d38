"""Usage of a worker's KV cache: its last report, and the rooms placed since (`placed-by-use`).

A worker reports with each renewal of its lease, and whenever a room on it ends. Prefill reports tokens to
compute (`baton.fleet.prefill_queue`), decode reports pages, which this module counts. A report covers all
rooms that the worker has entered. Rooms placed since are counted here, by the positions they begin with.
Without a report, all open rooms are counted so.

A report may be as old as two renewals, and rooms on the worker grow meanwhile. In the worst case a room is
placed that does not fit any more. That is harmless: it waits on the worker for pages, and no running room
makes space for it. The next report shows it waiting, which keeps others from being placed behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from baton.ids import RoomId
from baton.rooms.worker_load import WorkerLoad

WAITING_MIN: Final = 2
WAITING_SHARE: Final = 8
"""Rooms that may wait on a worker are 1/WAITING_SHARE of its running sequences. They get their pages, or join
the batch, in the very turn in which another room ends. If more rooms end at one time, the worker reports that
at once, and the next ones are placed. So it does not idle."""


@dataclass(slots=True)
class UnreportedRooms:
    """Rooms that a worker had not entered at its last report, each with its count. Each is looked at twice at
    most, however many reports come."""

    tokens: int = 0
    """Sum of the counts of all these rooms."""
    _since: dict[RoomId, int] = field(default_factory=dict)
    """Rooms in the order of their ids."""
    _late: dict[RoomId, int] = field(default_factory=dict)
    """Rooms that may not have been delivered yet, although later ones were entered."""

    def __len__(self) -> int:
        return len(self._since) + len(self._late)

    def add(self, room: RoomId, tokens: int) -> None:
        """Add a room that was just issued. `tokens`: its count."""
        self._since[room] = tokens
        self.tokens += tokens

    def delivered(self, room: RoomId) -> int:
        """Note that a room's opener delivered it. Return the count that falls away because the worker had
        entered later rooms."""
        return self._count_out(self._late, room)

    def release(self, room: RoomId) -> int:
        """Remove a room that the worker no longer holds. Return the count that falls away. If the worker had
        entered it, its next report counts the space."""
        return self._count_out(self._since, room) + self._count_out(self._late, room)

    def entered(self, entered: RoomId, is_brought: Callable[[RoomId], bool]) -> None:
        """Remove the rooms that a report covers: those up to the room id `entered`, if `is_brought` says that
        they were delivered."""
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
    """Free and used KV positions of one worker."""

    tokens_max: int
    """KV positions of its whole cache."""
    page_tokens: Sequence[int]
    """Tokens per page, by KV group. Pages of one token, in one group, if the worker did not register any."""
    load: WorkerLoad | None = None
    """Last report of the worker."""
    _free: int = field(init=False)
    """Free KV positions less those that waiting rooms need, at the last report. May be negative."""
    unreported: UnreportedRooms = field(default_factory=UnreportedRooms)
    """Rooms placed since then, by the KV positions that they begin with."""

    def __post_init__(self) -> None:
        self._free = self.tokens_max

    def fits(self, load: WorkerLoad) -> bool:
        """Return whether a report has the right number of KV groups."""
        return len(load.free) == len(load.asked) == len(self.page_tokens)

    @property
    def left(self) -> int:
        """KV positions that another room could begin with. Negative if waiting rooms ask for more."""
        return self._free - self.unreported.tokens

    @property
    def tokens(self) -> int:
        """KV positions that are used, reserved for running rooms, or asked for."""
        return self.tokens_max - self.left

    @property
    def growing(self) -> int:
        """Sequences that will take more KV as they are drawn, once all rooms that are placed run."""
        load = self.load
        return len(self.unreported) if load is None else load.running + load.waiting + len(self.unreported)

    @property
    def waiting(self) -> int:
        """Rooms that may be unable to begin: those reported as waiting, and all placed since."""
        load = self.load
        if load is None:
            return len(self.unreported)
        beyond = max(load.running - load.running_max, 0) * bool(load.running_max)
        return load.waiting + beyond + len(self.unreported)

    @property
    def accepts_waiting(self) -> bool:
        """Whether one more room that cannot begin yet may be placed here. Without a report, as many as the
        worker may hold."""
        load = self.load
        return load is None or self.waiting < max(WAITING_MIN, load.running // WAITING_SHARE)

    @property
    def has_batch_space(self) -> bool:
        """Whether the batch has space for one more sequence, once all rooms that are placed run."""
        load = self.load
        if load is None or not load.running_max:
            return True
        return self.growing < load.running_max

    def can_start(self, tokens: int) -> bool:
        """Return whether a room of `tokens` initial KV positions could begin now."""
        return self.left >= tokens and self.has_batch_space

    def update(self, load: WorkerLoad, entered: RoomId, is_brought: Callable[[RoomId], bool]) -> bool:
        """Take a report of the worker. Return whether it has more space than was assumed. A report older than
        the last one is ignored.

        `entered`: highest room id of those issued here that it has entered. `is_brought`: whether a room was
        delivered.
        """
        if self.load is not None and load.number <= self.load.number:
            return False
        before = self.left, self.accepts_waiting, self.has_batch_space
        pages = zip(load.free, load.asked, self.page_tokens, strict=True)
        self.load, self._free = load, min((free - asked) * size for free, asked, size in pages)
        self.unreported.entered(entered, is_brought)
        now = self.left, self.accepts_waiting, self.has_batch_space
        return any(more > less for more, less in zip(now, before, strict=True))
