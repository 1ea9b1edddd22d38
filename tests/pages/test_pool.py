"""Do pages move as the table lists, all of them or none, and is none lost or handed out twice?"""

from collections import Counter
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.pages.errors import IllegalPageMove, OutOfPages
from services.pages.pool import PAGE_MOVES, PagePool, PageState

PAGES = 6
WAYS = {
    PageState.FREE: [],
    PageState.RESERVED: [],
    PageState.EXPOSED: [PageState.EXPOSED],
    PageState.COMMITTED: [PageState.COMMITTED],
    PageState.QUARANTINED: [PageState.EXPOSED, PageState.QUARANTINED],
    PageState.CACHED: [PageState.COMMITTED, PageState.CACHED],
}


def move(pool: PagePool, pages: tuple[int, ...], to: PageState) -> None:
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
        move(pool, (0,), step)
    assert pool.state(0) is state
    return pool


@pytest.mark.parametrize(
    ("before", "after"),
    [each for each in product(PageState, PageState) if each[1] is not PageState.RESERVED],
    ids=str,
)
def test_moves_listed(before: PageState, after: PageState) -> None:
    pool = pool_with_page_in(before)
    if (before, after) in PAGE_MOVES:
        move(pool, (0,), after)
        assert pool.state(0) is after
    else:
        census = pool.census()
        with pytest.raises(IllegalPageMove):
            move(pool, (0,), after)
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


def test_the_lowest_pages_are_handed_out_first_and_ascending() -> None:
    pool = PagePool(5)
    assert pool.reserve(4) == (0, 1, 2, 3)
    pool.release((2, 0))
    assert pool.reserve(3) == (0, 2, 4)


def test_too_many_are_refused_and_none_is_taken() -> None:
    pool = PagePool(3)
    pool.reserve(1)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 free of 3"):
        pool.reserve(3)
    assert pool.free == 2


@pytest.mark.parametrize("pages", [(0, 1, 2), (0, 0)], ids=str)
def test_all_pages_move_or_none(pages: tuple[int, ...]) -> None:
    pool = PagePool(3)
    pool.reserve(2)
    with pytest.raises(IllegalPageMove):
        pool.release(pages)
    assert pool.census()[PageState.RESERVED] == 2
    assert pool.reserve(1) == (2,)


class Pool(RuleBasedStateMachine):
    """A pool beside the plainest model of one: a list of states."""

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
        assert self.pool.reserve(count) == tuple(free[:count])
        for page in free[:count]:
            self.model[page] = PageState.RESERVED

    @rule(
        pages=st.sets(st.integers(0, PAGES - 1), max_size=3),
        to=st.sampled_from([state for state in PageState if state is not PageState.RESERVED]),
    )
    def move(self, pages: set[int], to: PageState) -> None:
        named = tuple(sorted(pages))
        if all((self.model[page], to) in PAGE_MOVES for page in named):
            move(self.pool, named, to)
            for page in named:
                self.model[page] = to
        else:
            with pytest.raises(IllegalPageMove):
                move(self.pool, named, to)

    @invariant()
    def states_and_counts_hold(self) -> None:
        assert [self.pool.state(page) for page in range(PAGES)] == self.model
        assert self.pool.census() == dict.fromkeys(PageState, 0) | Counter(self.model)
        assert self.pool.free == self.model.count(PageState.FREE)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
