"""Which choices of the next step get the pages that they lack, and which rooms make space for them?

Whoever came first is served first. What is about to be given back anyway is waited for. Where that is not
enough, running rooms are retracted, the one that came last before the others, and never the one that came
first: while rooms run, one of them goes on (`oldest-goes-on`). Rooms that no other could go on for make space
after all others. The numbers are the same on all ranks, so each decides alone, and all decide the same
(`growth-is-agreed`).
"""

from collections.abc import Collection, Sequence
from operator import add, le, sub
from typing import NamedTuple, TypeAlias

from baton.ids import PageCounts, RoomId

Age: TypeAlias = tuple[int, RoomId]
"""(when the request came, the room): the least is the oldest."""


class Want(NamedTuple):
    """What one choice lacks for its next row."""

    age: Age
    pages: PageCounts


class RunningRoom(NamedTuple):
    age: Age
    pages: PageCounts
    """That could be taken again once the room gave everything back."""
    stays: bool = False
    """No other room could go on behind what it has: it makes space only where all others have."""


class Growth(NamedTuple):
    grown: Sequence[int]
    """Places among the wants of those that get what they lack."""
    retracted: Sequence[RoomId]
    """In the order in which they were chosen."""
    lacks: bool
    """What is about to be given back does not do, and nobody is left to be retracted: the rest is held by
    rooms that do not run yet, or kept from everybody."""


def suffice(free: PageCounts, wants: Sequence[Want]) -> bool:
    """Whether there are pages for all: most often there are."""
    wanted = zip(*(want.pages for want in wants), strict=True)
    return all(sum(counts) <= count for counts, count in zip(wanted, free, strict=True))


def spared(pages: PageCounts, free: PageCounts, margin: PageCounts) -> bool:
    """Whether a draft may have so many: they leave what those that run may need next (`drafts-make-way`)."""
    needed = map(add, pages, margin) if margin else pages
    return all(map(le, needed, free))


def growth(
    wants: Sequence[Want], running: Sequence[RunningRoom], free: PageCounts, coming: PageCounts
) -> Growth:
    """`running`: all rooms that may be retracted, and the oldest one. `free`: pages that could be taken now;
    `coming`: those that are about to be given back, whatever is decided here."""
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
    """Who gets pages of those that are `free`, and how many the others lack beyond these. The first that does
    not fit stops those that came after it, so that it is not overtaken for ever."""
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
