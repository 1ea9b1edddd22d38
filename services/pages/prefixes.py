"""Which pages hold the beginning of a sequence already, who reads them, and which is given up first?

A radix tree whose edges are whole pages of token ids: a page is found by the tokens it holds *and* by the
page before it, so that what it was computed from is known with it. A page enters when nothing will be written
to it any more and stays until its space is needed (`shared-is-read-only`).

Each salt has a root of its own: no way leads from one to what hangs on another (`same-root-only`).

A room pins every page from the root to the last one it uses. So a page is used as often, at least, as what
lies below it, and it becomes idle no earlier: in the order in which pages became idle, leaves come first, and
the oldest can always be given up without losing the way to another.

Deterministic: no clock and no order but that of the calls. Ranks that make the same calls hold the same tree,
page for page, and `digest` tells them when they do not.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from services.ids import PageId
from services.pages.checksum import mix
from services.pages.errors import IllegalPageMove, OutOfPages

UNSALTED: Final = 0

Way = tuple[int, tuple[int, ...]]
"""(the page before, or a root, the tokens in the page)"""


class Entered(NamedTuple):
    """What became of a room's pages."""

    way: tuple[PageId, ...]
    """All that the room uses now, from the root on."""
    fresh: tuple[PageId, ...]
    """Its own that entered: nobody else uses them yet."""
    woken: tuple[PageId, ...]
    """Those of others that were idle."""


@dataclass(slots=True)
class _Known:
    way: Way
    users: int = 0


class PrefixTree:
    """Pages by what they hold. Bounded by the pool whose pages it names."""

    def __init__(self, page_tokens: int) -> None:
        """`page_tokens`: of a page; 0 to know nothing, ever."""
        self.page_tokens = page_tokens
        self._pages: dict[PageId, _Known] = {}
        self._below: dict[Way, PageId] = {}
        self._idle: OrderedDict[PageId, None] = OrderedDict()
        """Without users, the one to be given up next first."""
        self.digest = 0
        """Of which page is known by what: ranks whose trees differ differ here, but for chance."""

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: PageId) -> bool:
        return page in self._pages

    @property
    def evictable(self) -> int:
        return len(self._idle)

    def users(self, page: PageId) -> int:
        """How many rooms use a page of the tree."""
        return self._pages[page].users

    def match(self, tokens: Sequence[int], salt: int = UNSALTED) -> tuple[PageId, ...]:
        """The pages that hold the longest beginning of `tokens`, from position 0 on, that is known under
        `salt`."""
        found: list[PageId] = []
        before = _root(salt)
        for key in self._keys(tokens):
            page = self._below.get((before, key))
            if page is None:
                break
            found.append(page)
            before = page
        return tuple(found)

    def idle(self, pages: Sequence[PageId]) -> int:
        """How many of `pages` nobody uses."""
        return sum(page in self._idle for page in pages)

    def pin(self, pages: Sequence[PageId]) -> tuple[PageId, ...]:
        """One more room uses these, a whole way from the root on. Returns those that were idle."""
        woken = tuple(page for page in pages if page in self._idle)
        for page in pages:
            self._idle.pop(page, None)
            self._pages[page].users += 1
        return woken

    def unpin(self, pages: Sequence[PageId]) -> tuple[PageId, ...]:
        """One room less uses these, as they were pinned. Returns those that are idle now."""
        ended: list[PageId] = []
        for page in reversed(pages):
            known = self._pages[page]
            if known.users == 0:
                raise IllegalPageMove(f"page {page}: unpinned more often than pinned")
            known.users -= 1
            if known.users == 0:
                self._idle[page] = None
                ended.append(page)
        return tuple(ended)

    def enter(
        self, tokens: Sequence[int], pages: Sequence[PageId], pinned: int, salt: int = UNSALTED
    ) -> Entered:
        """A room's `pages` hold `tokens`, and are not written to any more: know them by it, the whole ones.

        `pinned`: how many of them, the leading ones, it has pinned, by what is known under `salt`. Of what
        another room entered meanwhile that one's page stays, and is pinned: the room need not keep its own.
        """
        way = list(pages[:pinned])
        entered: list[PageId] = []
        for place, key in enumerate(self._keys(tokens)):
            if place < len(way):
                continue
            before = way[-1] if way else _root(salt)
            page = self._below.get((before, key))
            if page is None:
                page = pages[place]
                if page in self._pages:
                    raise IllegalPageMove(f"page {page} is known by other tokens")
                self._pages[page] = _Known((before, key))
                self._below[before, key] = page
                self.digest ^= _sign(page, (before, key))
                entered.append(page)
            way.append(page)
        return Entered(tuple(way), tuple(entered), self.pin(way[pinned:]))

    def evict(self, count: int) -> tuple[PageId, ...]:
        """Forget `count` pages that nobody uses, the longest idle first. Raises OutOfPages."""
        if count > len(self._idle):
            raise OutOfPages(f"{count} cached pages to give up, {len(self._idle)} are not in use")
        given_up = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in given_up:
            self._unlink(page, self._pages.pop(page).way)
        return tuple(given_up)

    def distrust(self, page: PageId) -> None:
        """It does not hold what it should, or a page below it does not: from now on neither is found, and
        their space is given up in its turn."""
        self._unlink(page, self._pages[page].way)

    def _unlink(self, page: PageId, way: Way) -> None:
        """It is not found any more, if it was: another page may be, by the same tokens."""
        if self._below.get(way) == page:
            del self._below[way]
            self.digest ^= _sign(page, way)

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The tokens of each whole page."""
        size = self.page_tokens
        if size == 0:
            return
        for start in range(0, len(tokens) - size + 1, size):
            yield tuple(tokens[start : start + size])


def _root(salt: int) -> int:
    """No page's number: those are 0 and more."""
    return -1 - salt


def _sign(page: PageId, way: Way) -> int:
    return mix(mix(page) + hash(way))
