"""Allocator of free pages, which it stores as runs of adjacent pages.

A room's pages are sent as one piece for each run of adjacent pages. So they come from a single run if any is
large enough. The smallest such run is used, which leaves large runs for large rooms.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from baton.ids import PageId


class FreeRuns:
    """Free pages of one pool, stored as runs of adjacent pages. Results depend only on which pages are free,
    not on the calls before."""

    def __init__(self, pages: int) -> None:
        """Make a pool of `pages` free pages, numbered from 0."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._by_size: list[tuple[int, int]] = []
        """Runs of adjacent free pages as (length in pages, first page), in ascending order."""
        if pages:
            self._put(0, 0, pages)

    def take(self, count: int) -> tuple[PageId, ...]:
        """Reserve `count` free pages. Return their numbers in ascending order.

        The smallest run with enough pages is used, the lowest of several. If no run is large enough, the
        largest one is used whole, and the rest is taken in the same way. The caller has checked that enough
        pages are free.
        """
        taken: list[int] = []
        while count:
            best = bisect_left(self._by_size, (count, 0))
            size, start = self._by_size[min(best, len(self._by_size) - 1)]
            place = bisect_left(self._starts, start)
            self._drop(place)
            used = min(size, count)
            if used < size:
                self._put(place, start + used, start + size)
            taken += range(start, start + used)
            count -= used
        return cast(tuple[PageId, ...], tuple(sorted(taken)))

    def give(self, pages: Iterable[PageId]) -> None:
        """Return `pages` to the free pages of the pool. None of them may be free already."""
        for start, stop in _runs(sorted(pages)):
            place = bisect_left(self._starts, start)
            if place < len(self._starts) and self._starts[place] == stop:
                stop = self._stops[place]
                self._drop(place)
            if place > 0 and self._stops[place - 1] == start:
                place -= 1
                start = self._starts[place]
                self._drop(place)
            self._put(place, start, stop)

    def _put(self, place: int, start: int, stop: int) -> None:
        self._starts.insert(place, start)
        self._stops.insert(place, stop)
        insort(self._by_size, (stop - start, start))

    def _drop(self, place: int) -> None:
        start, stop = self._starts.pop(place), self._stops.pop(place)
        del self._by_size[bisect_left(self._by_size, (stop - start, start))]


def _runs(pages: Sequence[PageId]) -> Iterator[tuple[int, int]]:
    """Yield the first page and the end (exclusive) of each run of adjacent pages. `pages`: in ascending
    order."""
    start = stop = -1
    for page in pages:
        if page != stop:
            if start >= 0:
                yield start, stop
            start = page
        stop = page + 1
    if start >= 0:
        yield start, stop
