"""Growth of running rooms on a decode rank: pages for their output tokens, and the reserve for these pages.

`baton.rooms.retraction` decides which rooms get pages and which are retracted (preempted). This module
collects the numbers for that, and changes the holdings.
"""

from collections.abc import Iterable, Sequence
from operator import add
from typing import Final, Generic, NamedTuple, TypeVar

from baton.handover.receiving_room import ReceivingRoom
from baton.ids import PageCounts
from baton.pages.holdings import Holdings
from baton.pages.layout import KvLayout
from baton.rooms.phases import Phase
from baton.rooms.retraction import RunningRoom, Want, growth, spared, suffice

AHEAD: Final = 2
"""Most sequences in granted rooms, as a multiple of the most sequences in a decode step.

So as many again may be in transfer or wait for the batch, which stays full while there is demand. A larger
factor takes pages that running rooms could grow into. The additional rooms would be retracted first, after
their prompts were computed in vain.
"""

R = TypeVar("R", bound=ReceivingRoom)


class Space(NamedTuple, Generic[R]):
    """Outcome of reserving pages for the rows of the next decode step. Each row belongs to one choice of a
    room."""

    computed: Sequence[int]
    """Indices of the rows that can be computed: all their pages are reserved, and their rooms are not
    retracted."""
    retracted: Sequence[R] = ()
    """Rooms that are retracted (preempted) to make space, the youngest first."""
    wanted: int = 0
    """Number of additional pages that the rows needed, summed over all KV groups."""
    given: int = 0
    """Number of additional pages that were reserved for rows, summed over all KV groups."""


class DraftReach(NamedTuple):
    """Outcome of reserving pages for the draft tokens of one row: how many positions of the row have
    pages."""

    stop: int
    """Position (exclusive) up to which the row can be computed, because its choice has pages for it."""
    given: int
    """Number of additional pages that were reserved for the draft tokens, summed over all KV groups."""


class PageGrowth(Generic[R]):
    """Reservation of pages for the output tokens of all rooms on one decode rank. Every result follows from
    numbers that all ranks of the worker share."""

    def __init__(self, rooms: Iterable[R], holdings: Holdings, layout: KvLayout, running_max: int) -> None:
        """Start without granted rooms. `rooms`: roster of the rank. `running_max`: most sequences of a
        step."""
        self.lacks = False
        """Whether a running room waits for pages and no younger room is left that could be retracted
        (preempted)."""
        self._rooms = rooms
        self._holdings = holdings
        self._layout = layout
        self._block = layout.growth
        self._growing = 0
        """Number of choices of granted rooms whose pages do not yet cover their longest possible output."""
        self._rows_left = AHEAD * running_max
        """Number of further sequences to which pages may still be granted. It can become negative, because
        all choices of a room are granted at once."""

    @property
    def margin(self) -> PageCounts:
        """Number of free pages that new rooms must leave for growing choices, by KV group: one block for each
        choice. () if no choice grows.

        Without this reserve, a new room could force a retraction in its first step.
        """
        return tuple([self._growing * count for count in self._block]) if self._growing else ()

    @property
    def rows(self) -> int:
        """Number of further sequences (choices of rooms) to which pages may still be granted. AHEAD bounds
        it."""
        return max(self._rows_left, 0)

    def granted(self, room: R) -> None:
        self._growing += room.growing
        self._rows_left -= room.rows
        self.begins(room)

    def begins(self, room: R) -> None:
        """Set a granted room's page table of each choice, and the number of positions whose KV each choice
        has."""
        pages = self._holdings.get(room.id).pages
        shared = tuple([table[:count] for table, count in zip(pages, room.division.shared, strict=True)])
        further = room.request.choices - 1
        room.pages = [pages, *[shared] * further]
        room.filled = [room.request.prefill_tokens, *[room.division.shared_tokens] * further]

    def over(self, room: R) -> None:
        """Stop reserving free pages for the growth of a room that has ended. Idempotent."""
        if room.pages:
            self._growing -= room.growing
            self._rows_left += room.rows
            room.pages = []

    def space_for(self, rows: Sequence[tuple[R, int, int]]) -> Space[R]:
        """Reserve pages for the rows of the next decode step, and choose the rooms to retract for them
        (`ReceivingSide.space_for`)."""
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
        """Return up to which position the drafts of a row have pages. Reserves pages for them that running
        rooms can spare (`ReceivingSide.reach`, `drafts-make-way`)."""
        pages, given = self._lacking(room, choice, stop), 0
        if any(pages) and spared(pages, self._holdings.available, self.margin):
            self._grow(room, choice, stop, pages)
            given = sum(pages)
        return DraftReach(min(room.covered[choice], stop), given)

    def _holders(self) -> tuple[list[tuple[R, PageCounts]], PageCounts]:
        """Return each running room with the number of pages that its end would free, and the total number of
        pages of rooms that are about to end. All numbers are by KV group."""
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
        """Return the number of pages that a choice still needs for its positions up to `stop`, by KV
        group."""
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
