"""Page pool: the state of each page of KV memory, and the legal moves between states.

                  reserve             expose                commit
         FREE -------------> RESERVED -------> EXPOSED -----------------> COMMITTED
          ^  ^                  |                 |                        |  |  ^
          |  +------------------+ release         | quarantine     release |  |  | commit
          |                                       v                        |  v  |
          +-------------------------------- QUARANTINED                    | CACHED
          |                release                                         |  |
          +----------------------------------------------------------------+--+ release

A peer's one-sided write cannot be recalled. So an exposed page never goes back to FREE directly. Either the
room's own seal proves that every write has ended (commit), or the page waits in quarantine for another proof
(`no-free-under-write`). Whether a page is exposed is recorded as its own state, not deduced from any queue
(`exposure-on-page`).

A full committed page may be in the prefix cache (`PrefixTree`), and several rooms may then read it. When the
last of these rooms has ended, the page becomes CACHED. No move leads from CACHED or COMMITTED to EXPOSED:
shared pages are only read (`shared-is-read-only`).
"""

from collections.abc import Iterable
from enum import Enum
from typing import Final

from baton.ids import PageId
from baton.pages.errors import IllegalPageMove, OutOfPages
from baton.pages.free_runs import FreeRuns


class PageState(Enum):
    __hash__ = object.__hash__  # the default hash of the name is computed anew at each lookup
    FREE = "free"
    RESERVED = "reserved"
    """State of a page that belongs to a room. No peer knows the page's address."""
    EXPOSED = "exposed"
    """State of a page that belongs to a room and that a peer may write to."""
    COMMITTED = "committed"
    """State of a page that belongs to a room and that no peer can write to any more."""
    QUARANTINED = "quarantined"
    """State of a page that its failed room has given up, while a write of a peer may still land in it."""
    CACHED = "cached"
    """State of a page that is in the prefix cache while no room uses it. It is evicted when its space is
    needed."""


PAGE_MOVES: Final[frozenset[tuple[PageState, PageState]]] = frozenset(
    {
        (PageState.FREE, PageState.RESERVED),
        (PageState.RESERVED, PageState.EXPOSED),
        (PageState.RESERVED, PageState.COMMITTED),
        (PageState.RESERVED, PageState.FREE),
        (PageState.EXPOSED, PageState.COMMITTED),
        (PageState.EXPOSED, PageState.QUARANTINED),
        (PageState.COMMITTED, PageState.FREE),
        (PageState.COMMITTED, PageState.CACHED),
        (PageState.CACHED, PageState.COMMITTED),
        (PageState.CACHED, PageState.FREE),
        (PageState.QUARANTINED, PageState.FREE),
    }
)
_BEFORE: Final = {to: tuple(one for one, after in PAGE_MOVES if after is to) for to in PageState}
"""States from which a page may move to a given state, by that state."""


class PagePool:
    """Pool of a fixed number of equal KV pages, with the state of each. `Holdings` records which room owns
    them.

    Adjacent pages are reserved together if possible (`FreeRuns`), so that a transfer needs few, large
    descriptors.
    """

    def __init__(self, pages: int) -> None:
        self._states = [PageState.FREE] * pages
        self._free = FreeRuns(pages)
        self._count = dict.fromkeys(PageState, 0) | {PageState.FREE: pages}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def free(self) -> int:
        return self._count[PageState.FREE]

    def state(self, page: PageId) -> PageState:
        return self._states[page]

    def census(self) -> dict[PageState, int]:
        return dict(self._count)

    def can_reserve(self, count: int) -> bool:
        return count <= self.free

    def reserve(self, count: int) -> tuple[PageId, ...]:
        """Reserve `count` free pages. Return their numbers in ascending order. Raises OutOfPages without
        reserving any."""
        if not self.can_reserve(count):
            raise OutOfPages(f"{count} pages asked for, {self.free} free of {len(self)}")
        pages = self._free.take(count)
        self._move(pages, PageState.RESERVED)
        return pages

    def expose(self, pages: Iterable[PageId]) -> None:
        self._move(pages, PageState.EXPOSED)

    def commit(self, pages: Iterable[PageId]) -> None:
        self._move(pages, PageState.COMMITTED)

    def quarantine(self, pages: Iterable[PageId]) -> None:
        self._move(pages, PageState.QUARANTINED)

    def cache(self, pages: Iterable[PageId]) -> None:
        self._move(pages, PageState.CACHED)

    def release(self, pages: Iterable[PageId]) -> None:
        """Free these pages. Raises IllegalPageMove for a state that forbids it, such as EXPOSED."""
        pages = tuple(pages)
        self._move(pages, PageState.FREE)
        self._free.give(pages)

    def _move(self, pages: Iterable[PageId], to: PageState) -> None:
        """Move `pages` to state `to`. Raises IllegalPageMove, without moving any, if one of them must not."""
        pages = tuple(pages)
        if len(set(pages)) != len(pages):
            raise IllegalPageMove(f"a page is named twice on its way to {to.value}")
        states, count, allowed = self._states, self._count, _BEFORE[to]
        for page in pages:
            if states[page] not in allowed:
                raise IllegalPageMove(f"page {page}: {states[page].value} to {to.value}")
        for page in pages:
            count[states[page]] -= 1
            states[page] = to
        count[to] += len(pages)
