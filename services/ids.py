"""Which number names what? A room, a tenancy, a process, a page: four numbers that are never mixed."""

from typing import Final, NewType, TypeAlias

RoomId = NewType("RoomId", int)
"""One live request. 64 bits, >= 1, never reused. Only the registry makes one, and no arithmetic on it says
who or where (`id-carries-no-placement`)."""

Generation = NewType("Generation", int)
"""Which tenancy of a metadata slot. >= 1; grows by one at each hand-out of any slot of the pool."""

Incarnation = NewType("Incarnation", int)
"""One process of a worker. 64 random bits, >= 1, drawn at start; a restarted worker is a new peer
(`incarnation`)."""

NO_PEER: Final = Incarnation(0)
"""Of a room that has no worker on the other side."""

PageId = NewType("PageId", int)
"""One page of a rank's pool, by its place there. >= 0."""

PageTables: TypeAlias = tuple[tuple[PageId, ...], ...]
"""A room's pages of each of a layout's groups, in the order of the groups, and then of its tokens."""

PageCounts: TypeAlias = tuple[int, ...]
"""How many pages of each group."""
