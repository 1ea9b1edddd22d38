"""Types of ids: rooms, worker processes, pages, and uses of a metadata slot. They are never mixed."""

from typing import Final, NewType, TypeAlias

RoomId = NewType("RoomId", int)
"""Id of one room (one request on one prefill and one decode worker). 64 bits, >= 1, never reused.

Only the registry makes one, and no part of it encodes a worker (`id-carries-no-placement`).
"""

Generation = NewType("Generation", int)
"""Number of one use of a metadata slot, >= 1. It grows by one whenever any slot of the pool is handed out, so
that messages about an earlier use are refused."""

Incarnation = NewType("Incarnation", int)
"""Id of one process of a worker: 64 random bits, >= 1, drawn when it starts. A restarted worker counts as a
new peer (`incarnation`)."""

NO_PEER: Final = Incarnation(0)
"""Incarnation that stands for no peer, in a room that has a worker on one side only."""

Opener = NewType("Opener", int)
"""Id of one run of a router: 63 random bits, >= 1, drawn when it starts. A room belongs to the router that
opened it, and obeys no other (`opener-owns`). A restarted router is another opener."""

NO_OPENER: Final = Opener(0)
"""Opener of a room whose caller named none."""

PageId = NewType("PageId", int)
"""Index of a KV page in a rank's page pool, >= 0."""

PageTables: TypeAlias = tuple[tuple[PageId, ...], ...]
"""Page tables of a room: for each KV group, its page ids in the order of the room's tokens."""

SALT_BYTES: Final = 16
"""Length of a prefix cache salt, in bytes. It is long enough that no two texts are found with the same
salt."""

PageCounts: TypeAlias = tuple[int, ...]
"""Numbers of pages, by KV group."""
