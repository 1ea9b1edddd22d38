"""How much of a worker is used: as it said last, and by what was placed on it since (`placed-by-use`)?

A worker says so with each renewal of its lease, and whenever a room on it ends: prefill in tokens that are to
be computed (`baton.fleet.prefill_queue`), decode in pages, of which this is. What it says counts
all rooms that it has entered; what was placed since is counted here, by what it begins with. A worker that
says nothing is one on which everything was placed since: it is counted by its open rooms.

What was said may be old, by two renewals at most. Meanwhile rooms on the worker grow, of which nothing is
known here. In the worst case a room is placed that does not fit any more. That is harmless: the worker grants
it pages when there are some, and nobody that runs makes space for it. So it waits there as one of a short
queue, and the worker's next word, in which it is one that waits, keeps others from being placed behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from baton.ids import RoomId
from baton.rooms.worker_load import WorkerLoad

WAITING_MIN: Final = 2
WAITING_SHARE: Final = 8
"""Of the sequences that run. A room that a worker cannot begin yet is sent to it while fewer wait there: it
gets its pages, or joins the batch, in the very turn in which another ends. Where more than these end at one
time, the worker says so at once, and the next are placed: it does not idle."""


@dataclass(slots=True)
class UnreportedRooms:
    """Rooms that a worker had not entered when it said something of itself last, each with what it is counted
    by. Each is looked at twice at most, however many words come."""

    tokens: int = 0
    """What all these are counted by."""
    _since: dict[RoomId, int] = field(default_factory=dict)
    """In the order of their ids."""
    _late: dict[RoomId, int] = field(default_factory=dict)
    """Those whose opener may not have brought them, although later ones were entered."""

    def __len__(self) -> int:
        return len(self._since) + len(self._late)

    def place(self, room: RoomId, tokens: int) -> None:
        """The worker is about to get a room that was issued now."""
        self._since[room] = tokens
        self.tokens += tokens

    def brought(self, room: RoomId) -> int:
        """The room's opener brought it. What is counted less by that: later ones had been entered."""
        return self._count_out(self._late, room)

    def gone(self, room: RoomId) -> int:
        """The worker holds nothing of the room. What is counted less by that: what it leaves is its own to
        say, if it had entered the room."""
        return self._count_out(self._since, room) + self._count_out(self._late, room)

    def entered(self, entered: RoomId, is_brought: Callable[[RoomId], bool]) -> None:
        """The worker says that it has this room, and so all before it that were brought."""
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
    """Of one worker."""

    tokens_max: int
    """KV positions that its whole cache holds."""
    page_tokens: Sequence[int]
    """Of each group; those of one where nothing was said."""
    load: WorkerLoad | None = None
    """What it said last."""
    _free: int = field(init=False)
    """KV positions that could be granted beyond what is asked for, by that; negative where more is asked."""
    since: UnreportedRooms = field(default_factory=UnreportedRooms)
    """Rooms, by the KV positions that they begin with."""

    def __post_init__(self) -> None:
        self._free = self.tokens_max

    def fits(self, load: WorkerLoad) -> bool:
        """It is of as many groups."""
        return len(load.free) == len(load.asked) == len(self.page_tokens)

    @property
    def left(self) -> int:
        """KV positions that another room could begin with; negative where those that wait ask for more."""
        return self._free - self.since.tokens

    @property
    def tokens(self) -> int:
        """KV positions that are used, kept for those that run, or asked for."""
        return self.tokens_max - self.left

    @property
    def growing(self) -> int:
        """Sequences that take more of it as they are drawn, once all rooms that are on it run."""
        load = self.load
        return len(self.since) if load is None else load.running + load.waiting + len(self.since)

    @property
    def waiting(self) -> int:
        """Rooms that it may be unable to begin: those of which it said so, and all that were placed since."""
        load = self.load
        if load is None:
            return len(self.since)
        beyond = max(load.running - load.running_max, 0) * bool(load.running_max)
        return load.waiting + beyond + len(self.since)

    @property
    def may_wait(self) -> bool:
        """One more room that it cannot begin yet is sent to it all the same. One that says nothing is asked
        for as many as it may hold."""
        load = self.load
        return load is None or self.waiting < max(WAITING_MIN, load.running // WAITING_SHARE)

    @property
    def has_row(self) -> bool:
        """A step would continue one more sequence, once all rooms that are on it run."""
        load = self.load
        if load is None or not load.running_max:
            return True
        return self.growing < load.running_max

    def begins(self, tokens: int) -> bool:
        """A room that begins with so many KV positions could begin now."""
        return self.left >= tokens and self.has_row

    def hear(self, load: WorkerLoad, entered: RoomId, is_brought: Callable[[RoomId], bool]) -> bool:
        """What it says. Whether there is more space than was thought. One that is older than what it said
        before is not listened to. `entered`: the highest of the rooms issued here that it has; `is_brought`:
        by its opener, as far as is known."""
        if self.load is not None and load.number <= self.load.number:
            return False
        before = self.left, self.may_wait, self.has_row
        pages = zip(load.free, load.asked, self.page_tokens, strict=True)
        self.load, self._free = load, min((free - asked) * size for free, asked, size in pages)
        self.since.entered(entered, is_brought)
        now = self.left, self.may_wait, self.has_row
        return any(more > less for more, less in zip(now, before, strict=True))
