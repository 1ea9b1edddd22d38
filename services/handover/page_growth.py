"""How do the rooms of a decode rank take pages as they draw, and how much is left for that?

`baton.rooms.page_growth` decides who gets what; here is what it decides by, and what follows for the
pages.
"""

from collections.abc import Iterable, Sequence
from operator import add
from typing import Final, Generic, NamedTuple, TypeVar

from baton.handover.receiving_room import ReceivingRoom
from baton.ids import PageCounts
from baton.pages.holdings import Holdings
from baton.pages.layout import KvLayout
from baton.rooms.page_growth import RunningRoom, Want, growth, spared, suffice
from baton.rooms.phases import Phase

AHEAD: Final = 2
"""How many times as many sequences are granted as a step continues: as many again may be on their way, or
wait for a place in the batch, so that none stays empty while there is demand. More would hold pages that
those which run could grow into, and would be the first to be retracted for them, computed in vain."""

R = TypeVar("R", bound=ReceivingRoom)


class Space(NamedTuple, Generic[R]):
    """For the next step."""

    computed: Sequence[int]
    """Places of the rows that have all their pages, and whose rooms go on."""
    retracted: Sequence[R] = ()
    """Rooms that make space, the youngest first."""
    wanted: int = 0
    """Pages that were lacking, over all groups."""
    given: int = 0
    """Of these, pages that were there."""


class DraftReach(NamedTuple):
    """Of a row with drafts."""

    stop: int
    """How far it gets: its choice has pages up to there."""
    given: int
    """Pages that were taken for that, over all groups."""


class PageGrowth(Generic[R]):
    """Of one rank. All that it says follows from numbers that are the same on every rank of the worker."""

    def __init__(self, rooms: Iterable[R], holdings: Holdings, layout: KvLayout, running_max: int) -> None:
        """`rooms`: all that there are. `running_max`: sequences that a step continues."""
        self.lacks = False
        """Somebody who runs waits for pages, and nobody is left to make space for it."""
        self._rooms = rooms
        self._holdings = holdings
        self._layout = layout
        self._block = layout.pages_for(layout.block_tokens)
        self._growing = 0
        """Choices of granted rooms that have no pages yet for all that they may come to hold."""
        self._rows_left = AHEAD * running_max
        """Sequences that may still be granted; below 0 by the last one's further choices."""

    @property
    def margin(self) -> PageCounts:
        """Pages that are left for those that grow, a block for each of their choices: they are not to make
        space at once for one that begins. () where nobody grows."""
        return tuple([self._growing * count for count in self._block]) if self._growing else ()

    @property
    def rows(self) -> int:
        """Sequences of rooms that may begin."""
        return max(self._rows_left, 0)

    def granted(self, room: R) -> None:
        self._growing += room.growing
        self._rows_left -= room.rows
        self.begins(room)

    def begins(self, room: R) -> None:
        """Which pages each of its choices has, before any grew, and how far they are filled once it runs."""
        pages = self._holdings.get(room.id).pages
        shared = tuple([table[:count] for table, count in zip(pages, room.division.shared, strict=True)])
        further = room.request.choices - 1
        room.pages = [pages, *[shared] * further]
        room.filled = [room.request.prefill_tokens, *[room.division.shared_tokens] * further]

    def over(self, room: R) -> None:
        """It takes no more pages: nothing is left free for it. Idempotent."""
        if room.pages:
            self._growing -= room.growing
            self._rows_left += room.rows
            room.pages = []

    def space_for(self, rows: Sequence[tuple[R, int, int]]) -> Space[R]:
        """See `ReceivingSide.space_for`."""
        self.lacks = False
        lacking = [place for place, (room, choice, stop) in enumerate(rows) if stop > room.covered[choice]]
        if not lacking:
            return Space(range(len(rows)))
        wants = [Want(rows[place][0].age, self._lacking(*rows[place])) for place in lacking]
        available = self._holdings.available
        grown: Sequence[int] = range(len(wants))
        gone: set[int] = set()
        retracted: list[R] = []
        if not suffice(available, wants):
            holders, coming = self._holders()
            running = [RunningRoom(room.age, pages, room.stays) for room, pages in holders]
            grown, youngest, self.lacks = growth(wants, running, available, coming)
            by_id = {room.id: room for room, _ in holders}
            retracted = [by_id[room] for room in youngest]
            gone.update(youngest)
        for place in grown:
            self._grow(*rows[lacking[place]], wants[place].pages)
        dry = set(lacking).difference(lacking[place] for place in grown)
        computed = [at for at, (room, _, _) in enumerate(rows) if at not in dry and room.id not in gone]
        wanted, given = (sum(sum(wants[at].pages) for at in which) for which in (range(len(wants)), grown))
        return Space(computed, retracted, wanted, given)

    def reach(self, room: R, choice: int, stop: int) -> DraftReach:
        """See `ReceivingSide.reach` (`drafts-make-way`)."""
        pages, given = self._lacking(room, choice, stop), 0
        if any(pages) and spared(pages, self._holdings.available, self.margin):
            self._grow(room, choice, stop, pages)
            given = sum(pages)
        return DraftReach(min(room.covered[choice], stop), given)

    def _holders(self) -> tuple[list[tuple[R, PageCounts]], PageCounts]:
        """Rooms that run, each with what it would give back, and what those that are over are about to."""
        coming: PageCounts = (0,) * len(self._block)
        running: list[tuple[R, PageCounts]] = []
        for room in self._rooms:
            if room.phase is not Phase.SUCCESS:
                continue
            pages = self._holdings.returning(room.id)
            if room.runs:
                running.append((room, pages))
            else:
                coming = tuple(map(add, coming, pages))
        return running, coming

    def _lacking(self, room: R, choice: int, stop: int) -> PageCounts:
        """Pages that a choice needs for so many positions beyond those that it has."""
        needed = zip(self._layout.pages_for(stop), room.pages[choice], strict=True)
        return tuple([max(count - len(table), 0) for count, table in needed])

    def _grow(self, room: R, choice: int, stop: int, pages: PageCounts) -> None:
        growing = room.growing
        fresh = self._holdings.grow(room.id, pages, choice)
        table = room.pages[choice] = tuple(map(add, room.pages[choice], fresh))
        room.covered[choice] = room.division.positions(tuple(map(len, table)))
        if room.covered[choice] < stop:
            raise AssertionError(f"room {room.id}: {room.covered[choice]} of {stop} positions have pages")
        self._growing += room.growing - growing
