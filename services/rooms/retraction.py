"""Distribution of free pages to choices that need more for their next row, and retraction of rooms to make
space.

The oldest room is served first. Pages that are about to come back are waited for. If they are not enough,
running rooms are retracted, the youngest first, and never the oldest: while rooms run, one of them goes on
(`oldest-goes-on`). Rooms that no other room could continue are retracted last. The numbers are equal on all
ranks, so each rank decides alone and all decide the same (`growth-is-agreed`).
"""

from collections.abc import Collection, Sequence
from operator import add, le, sub
from typing import NamedTuple, TypeAlias

from baton.ids import PageCounts, RoomId

Age: TypeAlias = tuple[int, RoomId]
"""(arrival of the request, room id). The least is the oldest."""


class Want(NamedTuple):
    """Pages that one choice lacks for its next row."""

    age: Age
    pages: PageCounts


class RunningRoom(NamedTuple):
    age: Age
    pages: PageCounts
    """Pages that come back, by KV group, once the room gave everything back."""
    stays: bool = False
    """Whether its output is too long for any other room to continue. It is retracted only after all
    others."""


class Growth(NamedTuple):
    grown: Sequence[int]
    """Indices of the wants that are served."""
    retracted: Sequence[RoomId]
    """Rooms to retract, in the order of the choice."""
    lacks: bool
    """Whether pages still lack when all rooms that may be retracted are. Rooms that do not run yet have the
    others, or they are reserved."""


def suffice(free: PageCounts, wants: Sequence[Want]) -> bool:
    """Return whether `free` pages serve all wants. Most often they do."""
    wanted = zip(*(want.pages for want in wants), strict=True)
    return all(sum(counts) <= count for counts, count in zip(wanted, free, strict=True))


def spared(pages: PageCounts, free: PageCounts, margin: PageCounts) -> bool:
    """Return whether a draft may take `pages`: `margin` pages are left for what running rooms may need next
    (`drafts-make-way`)."""
    needed = map(add, pages, margin) if margin else pages
    return all(map(le, needed, free))


def growth(
    wants: Sequence[Want], running: Sequence[RunningRoom], free: PageCounts, coming: PageCounts
) -> Growth:
    """Return which wants are served and which rooms are retracted.

    `running`: rooms that may be retracted, and the oldest one. `free`: pages that are free now. `coming`:
    pages that are about to come back in any case.
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
    """Return the indices of the wants that `free` pages serve, and the pages that the others lack. The first
    want that does not fit stops younger ones, so that it is not overtaken for ever."""
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
