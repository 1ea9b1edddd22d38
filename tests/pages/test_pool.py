"""Tests of the page pool: only listed moves, all pages or none, and none lost or handed out twice."""

from collections import Counter
from itertools import permutations, product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.ids import PageId
from baton.pages.errors import IllegalPageMove, OutOfPages
from baton.pages.pool import PAGE_MOVES, PagePool, PageState
from tests.pages.ids import page_ids

PAGES = 9
FIRST = page_ids(0)
WAYS = {
    PageState.FREE: [],
    PageState.RESERVED: [],
    PageState.EXPOSED: [PageState.EXPOSED],
    PageState.COMMITTED: [PageState.COMMITTED],
    PageState.QUARANTINED: [PageState.EXPOSED, PageState.QUARANTINED],
    PageState.CACHED: [PageState.COMMITTED, PageState.CACHED],
}


def move(pool: PagePool, pages: tuple[PageId, ...], to: PageState) -> None:
    match to:
        case PageState.EXPOSED:
            pool.expose(pages)
        case PageState.COMMITTED:
            pool.commit(pages)
        case PageState.QUARANTINED:
            pool.quarantine(pages)
        case PageState.CACHED:
            pool.cache(pages)
        case PageState.FREE:
            pool.release(pages)
        case PageState.RESERVED:
            raise ValueError("pages are reserved by number, not by name")


def pool_with_page_in(state: PageState) -> PagePool:
    pool = PagePool(2)
    if state is not PageState.FREE:
        pool.reserve(1)
    for step in WAYS[state]:
        move(pool, FIRST, step)
    assert pool.state(*FIRST) is state
    return pool


@pytest.mark.parametrize(
    ("before", "after"),
    [each for each in product(PageState, PageState) if each[1] is not PageState.RESERVED],
    ids=str,
)
def test_moves_listed(before: PageState, after: PageState) -> None:
    pool = pool_with_page_in(before)
    if (before, after) in PAGE_MOVES:
        move(pool, FIRST, after)
        assert pool.state(*FIRST) is after
    else:
        census = pool.census()
        with pytest.raises(IllegalPageMove):
            move(pool, FIRST, after)
        assert pool.census() == census


def test_no_free_under_write_exposed_pages_never_go_straight_to_free() -> None:
    assert {after for before, after in PAGE_MOVES if before is PageState.EXPOSED} == {
        PageState.COMMITTED,
        PageState.QUARANTINED,
    }


def test_shared_is_read_only_what_may_be_shared_is_never_exposed() -> None:
    shared = {PageState.COMMITTED, PageState.CACHED}
    assert not [each for each in PAGE_MOVES if each[0] in shared and each[1] is PageState.EXPOSED]
    assert {before for before, after in PAGE_MOVES if after is PageState.CACHED} == {PageState.COMMITTED}


def test_neighbours_are_handed_out_together_of_the_smallest_gap_that_has_so_many() -> None:
    pool = PagePool(12)
    assert pool.reserve(10) == tuple(range(10))
    pool.release(page_ids(8, 1, 3, 4, 5))  # free: 1, 3-5, 8, 10-11
    assert pool.reserve(2) == (10, 11)
    assert pool.reserve(2) == (3, 4)
    assert pool.reserve(1) == (1,)


def test_where_no_gap_has_so_many_the_largest_are_handed_out_ascending() -> None:
    pool = PagePool(10)
    pool.reserve(10)
    pool.release(page_ids(0, 2, 3, 5, 6, 7, 9))
    assert pool.reserve(6) == (0, 2, 3, 5, 6, 7)
    assert pool.reserve(1) == (9,)


def test_too_many_are_refused_and_none_is_taken() -> None:
    pool = PagePool(3)
    pool.reserve(1)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 free of 3"):
        pool.reserve(3)
    assert pool.free == 2


@pytest.mark.parametrize("pages", [page_ids(0, 1, 2), page_ids(0, 0)], ids=str)
def test_all_pages_move_or_none(pages: tuple[PageId, ...]) -> None:
    pool = PagePool(3)
    pool.reserve(2)
    with pytest.raises(IllegalPageMove):
        pool.release(pages)
    assert pool.census()[PageState.RESERVED] == 2
    assert pool.reserve(1) == (2,)


def gaps_of(free: list[int]) -> list[list[int]]:
    """Runs of neighbours."""
    gaps: list[list[int]] = []
    for page in free:
        if gaps and gaps[-1][-1] == page - 1:
            gaps[-1].append(page)
        else:
            gaps.append([page])
    return gaps


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_pools_with_the_same_free_pages_hand_out_the_same_ones(order: tuple[int, ...]) -> None:
    """Ranks keep the same tables, whatever order a table gave its pages back in."""
    for counts in ((1, 2, 1), (4,), (3, 1), (2, 2)):
        pool, fresh = PagePool(6), PagePool(4)
        pool.reserve(6)
        for page in order:
            pool.release(page_ids(page))
        assert [pool.reserve(count) for count in counts] == [fresh.reserve(count) for count in counts]


class Pool(RuleBasedStateMachine):
    """A page pool beside a plain model of it: a list of states."""

    @initialize()
    def start(self) -> None:
        self.pool = PagePool(PAGES)
        self.model = [PageState.FREE] * PAGES

    @rule(count=st.integers(0, PAGES + 1))
    def reserve(self, count: int) -> None:
        free = [page for page, state in enumerate(self.model) if state is PageState.FREE]
        assert self.pool.can_reserve(count) == (count <= len(free))
        if count > len(free):
            with pytest.raises(OutOfPages):
                self.pool.reserve(count)
            return
        gaps = gaps_of(free)
        taken = self.pool.reserve(count)
        assert taken == tuple(sorted(set(taken) & set(free)))
        assert len(taken) == count
        if any(len(gap) >= count for gap in gaps):
            smallest = min((gap for gap in gaps if len(gap) >= count), key=len)
            assert list(taken) == smallest[:count]
        for page in taken:
            self.model[page] = PageState.RESERVED

    @rule(
        pages=st.sets(st.integers(0, PAGES - 1), max_size=5),
        to=st.sampled_from([state for state in PageState if state is not PageState.RESERVED]),
    )
    def move(self, pages: set[int], to: PageState) -> None:
        named = page_ids(*sorted(pages))
        if all((self.model[page], to) in PAGE_MOVES for page in named):
            move(self.pool, named, to)
            for page in named:
                self.model[page] = to
        else:
            with pytest.raises(IllegalPageMove):
                move(self.pool, named, to)

    @invariant()
    def states_and_counts_hold(self) -> None:
        assert [self.pool.state(page) for page in page_ids(*range(PAGES))] == self.model
        assert self.pool.census() == dict.fromkeys(PageState, 0) | Counter(self.model)
        assert self.pool.free == self.model.count(PageState.FREE)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
