"""Growth of the rooms of a decode rank: pages that are taken while tokens are drawn, and the reserve for
them.

`baton.rooms.retraction` decides which choice gets pages. This module collects what that needs, and changes
the holdings.
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
"""Factor by which more sequences may be granted than a step continues.

As many again may be in transfer or wait for the batch, so that the batch stays full while there is demand.
A larger factor takes pages that running rooms could grow into. The additional rooms would be retracted
first, after their prompts were computed in vain.
"""

R = TypeVar("R", bound=ReceivingRoom)


class Space(NamedTuple, Generic[R]):
    """Pages for the rows of the next step."""

    computed: Sequence[int]
    """Indices of the rows that have all their pages, and whose rooms go on."""
    retracted: Sequence[R] = ()
    """Rooms that are retracted to make space, the youngest first."""
    wanted: int = 0
    """Number of pages that were lacking, over all groups."""
    given: int = 0
    """Number of these pages that were free."""


class DraftReach(NamedTuple):
    """Reach of a row with drafts."""

    stop: int
    """Position at which the row ends: its choice has pages up to there."""
    given: int
    """Number of pages taken for the drafts, over all groups."""


class PageGrowth(Generic[R]):
    """Growth of the rooms of one rank. Every result follows from numbers that all ranks of the worker
    share."""

    def __init__(self, rooms: Iterable[R], holdings: Holdings, layout: KvLayout, running_max: int) -> None:
        """Make it without growing choices. `rooms`: roster of the rank. `running_max`: most sequences of a
        step."""
        self.lacks = False
        """Whether a running room waits for pages and no younger room is left to retract."""
        self._rooms = rooms
        self._holdings = holdings
        self._layout = layout
        self._block = layout.pages_for(layout.block_tokens)
        self._growing = 0
        """Number of choices of granted rooms whose pages do not yet cover their longest possible output."""
        self._rows_left = AHEAD * running_max
        """Number of sequences that may still be granted. The further choices of the last room can make it
        negative."""

    @property
    def margin(self) -> PageCounts:
        """Pages that stay free for growing choices, by KV group: one block for each. () if no choice grows.

        Without this reserve, a new room could force a retraction in its first step.
        """
        return tuple([self._growing * count for count in self._block]) if self._growing else ()

    @property
    def rows(self) -> int:
        """Number of sequences that may still begin."""
        return max(self._rows_left, 0)

    def granted(self, room: R) -> None:
        self._growing += room.growing
        self._rows_left -= room.rows
        self.begins(room)

    def begins(self, room: R) -> None:
        """Set the page tables of a granted room: the pages of each choice before growth, and how far they
        are filled."""
        pages = self._holdings.get(room.id).pages
        shared = tuple([table[:count] for table, count in zip(pages, room.division.shared, strict=True)])
        further = room.request.choices - 1
        room.pages = [pages, *[shared] * further]
        room.filled = [room.request.prefill_tokens, *[room.division.shared_tokens] * further]

    def over(self, room: R) -> None:
        """End the growth of a room: no page is reserved for it any more. Idempotent."""
        if room.pages:
            self._growing -= room.growing
            self._rows_left += room.rows
            room.pages = []

    def space_for(self, rows: Sequence[tuple[R, int, int]]) -> Space[R]:
        """Give pages to the rows of the next step (`ReceivingSide.space_for`)."""
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
        """Return how far drafts of a row have pages (`ReceivingSide.reach`, `drafts-make-way`)."""
        pages, given = self._lacking(room, choice, stop), 0
        if any(pages) and spared(pages, self._holdings.available, self.margin):
            self._grow(room, choice, stop, pages)
            given = sum(pages)
        return DraftReach(min(room.covered[choice], stop), given)

    def _holders(self) -> tuple[list[tuple[R, PageCounts]], PageCounts]:
        """Return the running rooms with the pages that each would give back, and the pages of rooms about
        to end."""
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
        """Return the number of pages, by group, that a choice lacks for these positions."""
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
