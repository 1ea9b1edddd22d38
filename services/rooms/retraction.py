"""Assignment of free pages to choices that need more for their next token, and retraction of rooms to free
pages.

The oldest room is served first. Pages that are about to become free are waited for. If they are not enough,
running rooms are retracted (preempted), the youngest first. The oldest room is never retracted, so one room
always makes progress (`oldest-goes-on`). Rooms that no other room could continue are retracted last. The
numbers are equal on all ranks, so each rank decides alone and all decide the same (`growth-is-agreed`).
"""

from collections.abc import Collection, Sequence
from operator import add, le, sub
from typing import NamedTuple, TypeAlias

from baton.ids import PageCounts, RoomId

Age: TypeAlias = tuple[int, RoomId]
"""Age of a room: (arrival time of its request in milliseconds, room id). The least is the oldest."""


class Want(NamedTuple):
    """Need of one choice: the number of pages that it lacks for its next token, by KV group, and the age of
    its room."""

    age: Age
    pages: PageCounts


class RunningRoom(NamedTuple):
    age: Age
    pages: PageCounts
    """Number of pages that become free, by KV group, if this running room is retracted."""
    stays: bool = False
    """Whether the room's prompt and output are too long for any other room to continue. Such a room is
    retracted only after all others."""


class Growth(NamedTuple):
    grown: Sequence[int]
    """Indices of the needs (`Want`) that are met now: these choices get their pages."""
    retracted: Sequence[RoomId]
    """Ids of the rooms to retract, in the order in which they were chosen."""
    lacks: bool
    """Whether pages are still missing after all permitted retractions. They are then held by rooms that do
    not run yet, or reserved for such rooms."""


def suffice(free: PageCounts, wants: Sequence[Want]) -> bool:
    """Return whether `free` pages (by KV group) meet the needs of all choices, which is the usual case."""
    wanted = zip(*(want.pages for want in wants), strict=True)
    return all(sum(counts) <= count for counts, count in zip(wanted, free, strict=True))


def spared(pages: PageCounts, free: PageCounts, margin: PageCounts) -> bool:
    """Return whether draft tokens may take `pages`. They may if `margin` pages stay free for running rooms
    (`drafts-make-way`). All three are counts by KV group."""
    needed = map(add, pages, margin) if margin else pages
    return all(map(le, needed, free))


def growth(
    wants: Sequence[Want], running: Sequence[RunningRoom], free: PageCounts, coming: PageCounts
) -> Growth:
    """Decide which choices get the pages that they need, and which rooms are retracted (preempted) for that.

    `running`: rooms that may be retracted, and the oldest one. `free`: number of pages that are free now.
    `coming`: number of pages that are about to become free in any case.
    """
    retracted: list[RoomId] = []
    grown, short = _served(wants, free, retracted)
    if any(short):
        oldest = min(running, default=None)
        for room in sorted(running, key=lambda each: (not each.stays, each.age), reverse=True):
            if room is oldest:
                continue
            if all(map(le, short, coming)):
                break
            retracted.append(room.age[1])
            coming = tuple(map(add, coming, room.pages))
            grown, short = _served(wants, free, retracted)
    return Growth(grown, retracted, not all(map(le, short, coming)))


def _served(
    wants: Sequence[Want], free: PageCounts, gone: Collection[RoomId]
) -> tuple[list[int], PageCounts]:
    """Return the indices of the needs (`Want`) that `free` pages meet, and the number of pages that are
    missing, by KV group.

    The first need that cannot be met blocks those of all younger rooms, so that they do not overtake it again
    and again.
    """
    grown: list[int] = []
    blocked = False
    needed: PageCounts = (0,) * len(free)
    left = [place for place, want in enumerate(wants) if want.age[1] not in gone]
    for place in sorted(left, key=lambda place: wants[place].age):
        needed = tuple(map(add, needed, wants[place].pages))
        blocked = blocked or not all(map(le, needed, free))
        if not blocked:
            grown.append(place)
    return grown, tuple(max(lack, 0) for lack in map(sub, needed, free))
