"""Numbers that name a room, a tenancy of a slot, a process of a worker and a page. They are never mixed."""

from typing import Final, NewType, TypeAlias

RoomId = NewType("RoomId", int)
"""Id of one room. 64 bits, >= 1, never reused. Only the registry makes one, and no part of it encodes a
worker (`id-carries-no-placement`)."""

Generation = NewType("Generation", int)
"""Number of a tenancy of a metadata slot, >= 1. It grows by one at each hand-out of any slot of the pool."""

Incarnation = NewType("Incarnation", int)
"""Id of one process of a worker: 64 random bits, >= 1, drawn at its start. A restarted worker is a new peer
(`incarnation`)."""

NO_PEER: Final = Incarnation(0)
"""Peer of a room without a worker on the other side."""

PageId = NewType("PageId", int)
"""Index of a page in a rank's pool, >= 0."""

PageTables: TypeAlias = tuple[tuple[PageId, ...], ...]
"""Pages of a room by KV group, in the order of its tokens."""

PageCounts: TypeAlias = tuple[int, ...]
"""Numbers of pages, by KV group."""
