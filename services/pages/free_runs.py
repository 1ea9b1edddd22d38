"""Free pages as runs of adjacent pages, and the choice of which to reserve together.

A room's pages are sent as one piece for each run of adjacent pages. So they come from one run if any is large
enough. The smallest such run is used, which leaves the large ones for large rooms.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from baton.ids import PageId


class FreeRuns:
    """Free pages as runs of adjacent pages. Equal sets of free pages give equal results, however they
    arose."""

    def __init__(self, pages: int) -> None:
        """Make `pages` free pages, numbered from 0."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._by_size: list[tuple[int, int]] = []
        """Length and start of each run, ascending."""
        if pages:
            self._put(0, 0, pages)

    def take(self, count: int) -> tuple[PageId, ...]:
        """Reserve `count` free pages, in ascending order.

        The smallest run with enough pages is used, the lowest of several. If there is none, the largest run
        is used whole, and the rest comes likewise. There must be enough pages.
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
        """Free `pages`, none of which is free."""
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
    """Yield the start and end of each run of adjacent pages in ascending `pages`."""
    start = stop = -1
    for page in pages:
        if page != stop:
            if start >= 0:
                yield start, stop
            start = page
        stop = page + 1
    if start >= 0:
        yield start, stop
