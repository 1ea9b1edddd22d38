"""Which free pages lie side by side, and which of them are best taken together?

What a room's pages hold travels in as many pieces as they lie in, so they come out of one gap wherever one
is large enough: the smallest that is, which keeps the large ones for large rooms.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from baton.ids import PageId


class FreeRuns:
    """Free pages as runs of neighbours. Those with the same free pages are the same in everything, however
    they came to be."""

    def __init__(self, pages: int) -> None:
        """`pages` free ones, from 0 on."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._by_size: list[tuple[int, int]] = []
        """(pages, start) of each gap, ascending."""
        if pages:
            self._put(0, 0, pages)

    def take(self, count: int) -> tuple[PageId, ...]:
        """`count` of the free pages, ascending: of the smallest gap that has so many, the lowest of several;
        where none has, of the largest, and the rest likewise. There must be so many."""
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
        """`pages`, of which none is free, are free from now on."""
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
    """(first, behind the last) of each run of neighbours in ascending `pages`."""
    start = stop = -1
    for page in pages:
        if page != stop:
            if start >= 0:
                yield start, stop
            start = page
        stop = page + 1
    if start >= 0:
        yield start, stop
