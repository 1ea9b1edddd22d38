"""Tests of the prefix tree: longest match, no eviction of pages in use, and eviction of the oldest first."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.ids import PageId, PageTables
from baton.pages.errors import IllegalPageMove, OutOfPages
from baton.pages.prefix_tree import PrefixTree
from tests.pages.ids import page_ids

SIZE = 2
SALT = 2**127 + 5


def both(pages: tuple[PageId, ...]) -> PageTables:
    """Return tables of two groups. The second group has two pages for each page of the first, numbered from
    it."""
    return pages, tuple(PageId(SIZE * page + each) for page in pages for each in range(SIZE))


def tree_of(*sequences: tuple[tuple[int, ...], tuple[int, ...]]) -> PrefixTree:
    """Return a prefix tree of these (tokens, pages), each entered by a room that has ended."""
    tree = PrefixTree((SIZE,))
    for tokens, pages in sequences:
        tree.unpin(tree.enter(tokens, (page_ids(*pages),), 0).way)
    return tree


def test_the_longest_known_beginning_is_found() -> None:
    tree = tree_of(((1, 2, 3, 4, 5, 6), (10, 11, 12)), ((1, 2, 9, 9), (20, 21)))
    assert tree.match((1, 2, 3, 4, 5, 6, 7)) == (10, 11, 12)
    assert tree.match((1, 2, 9, 9, 5)) == (10, 21)
    assert tree.match((1, 2, 3, 9)) == (10,)
    assert tree.match((2, 1)) == ()


def test_only_whole_pages_are_known() -> None:
    tree = tree_of(((1, 2, 3), (10, 11)))
    assert PageId(11) not in tree
    assert tree.match((1, 2, 3, 4)) == (10,)
    assert tree.match((1,)) == ()


def test_the_same_tokens_behind_others_are_another_page() -> None:
    tree = tree_of(((1, 1, 5, 5), (10, 11)))
    assert tree.match((5, 5)) == ()


def test_same_root_only_the_same_tokens_under_another_salt_are_another_page() -> None:
    tree = PrefixTree((SIZE,))
    tree.enter((1, 2, 3, 4), (page_ids(10, 11),), 0)
    assert tree.match((1, 2, 3, 4), SALT) == ()
    assert tree.enter((1, 2, 3, 4), (page_ids(20, 21),), 0, SALT).way == (20, 21)
    assert tree.match((1, 2, 3, 4)) == (10, 11)
    assert tree.match((1, 2, 3, 4), SALT) == (20, 21)
    assert tree.match((1, 2, 3, 4), SALT + 1) == ()


def test_divergence_detected_a_salt_is_in_the_digest() -> None:
    one, other = PrefixTree((SIZE,)), PrefixTree((SIZE,))
    one.enter((1, 2), (page_ids(10),), 0, SALT)
    other.enter((1, 2), (page_ids(10),), 0, SALT + 1)
    assert one.digest != other.digest


def test_the_page_entered_first_stays_and_its_other_is_the_rooms_own() -> None:
    tree = PrefixTree((SIZE,))
    assert tree.enter((1, 2), (page_ids(10),), 0) == ((10,), (10,), (), (), ())
    assert tree.enter((1, 2, 3, 4), (page_ids(20, 21),), 0) == ((10, 21), (21,), (), ((20,),), ())
    assert (tree.users(PageId(10)), tree.users(PageId(21))) == (2, 1)
    assert PageId(20) not in tree
    tree.unpin(page_ids(10))
    tree.unpin(page_ids(10, 21))
    assert tree.enter((1, 2), (page_ids(30),), 0).woken == (10,)


def test_what_is_in_use_is_not_given_up() -> None:
    tree = PrefixTree((SIZE,))
    tree.enter((1, 2), (page_ids(10),), 0)
    assert tree.evictable == 0
    with pytest.raises(OutOfPages, match="1 cached pages to give up, 0 are not in use"):
        tree.evict(1)
    assert tree.match((1, 2)) == (10,)


def test_shared_is_read_only_what_another_room_reads_still_is_not_given_up() -> None:
    tree = PrefixTree((SIZE,))
    tree.enter((1, 2), (page_ids(10),), 0)
    tree.pin(page_ids(10))
    assert tree.unpin(page_ids(10)) == ()
    assert tree.evictable == 0
    assert tree.unpin(page_ids(10)) == (10,)
    assert tree.evictable == 1


def test_the_longest_idle_leaf_is_given_up_first() -> None:
    tree = tree_of(((1, 2, 3, 4), (10, 11)), ((5, 6), (20,)))
    tree.pin(tree.match((1, 2)))
    tree.unpin(page_ids(10))
    assert tree.evict(3) == ((11, 20, 10),)
    assert len(tree) == 0


def test_more_unpins_than_pins_are_a_bug() -> None:
    tree = tree_of(((1, 2), (10,)))
    with pytest.raises(IllegalPageMove, match="unpinned more often than pinned"):
        tree.unpin(page_ids(10))


def test_a_page_is_known_by_one_beginning() -> None:
    tree = tree_of(((1, 2), (10,)))
    with pytest.raises(IllegalPageMove, match="known by other tokens"):
        tree.enter((3, 4), (page_ids(10),), 0)


def test_the_digest_is_of_what_is_known_now() -> None:
    one, other = tree_of(((1, 2), (10,)), ((3, 4), (11,))), tree_of(((3, 4), (11,)), ((1, 2), (10,)))
    assert one.digest == other.digest
    assert one.digest != tree_of(((1, 2), (11,)), ((3, 4), (10,))).digest
    one.evict(2)
    assert one.digest == PrefixTree((SIZE,)).digest


def test_what_is_distrusted_is_not_found_nor_what_hangs_on_it_and_gives_up_its_space() -> None:
    tree = tree_of(((1, 2, 3, 4, 5, 6), (10, 11, 12)), ((1, 2, 9, 9), (20, 21)))
    clean = tree_of(((1, 2, 9, 9), (10, 21)))
    tree.distrust(PageId(11))
    tree.distrust(PageId(11))
    assert tree.match((1, 2, 3, 4, 5, 6)) == (10,)
    assert tree.match((1, 2, 9, 9)) == (10, 21)
    again = tree.enter((1, 2, 3, 4), (page_ids(10, 30),), 0)
    assert again.way == (10, 30), "the same tokens, computed anew"
    tree.unpin(again.way)
    assert tree.evictable == len(tree) == 5
    assert set(tree.evict(2)[0]) == {11, 12}
    assert tree.match((1, 2, 3, 4)) == (10, 30)
    assert clean.digest != tree.digest


def test_a_room_that_has_begun_with_what_is_distrusted_is_followed_by_nobody() -> None:
    tree = tree_of(((1, 2), (10,)))
    tree.pin(page_ids(10))
    tree.distrust(PageId(10))
    assert tree.enter((1, 2, 3, 4), (page_ids(10, 11),), 1).way == (10, 11)
    assert tree.match((1, 2, 3, 4)) == ()
    assert tree.unpin(page_ids(10, 11)) == (11, 10)
    assert tree.evict(2) == ((11, 10),)
    assert len(tree) == tree.digest == 0


def test_a_tree_of_no_page_size_knows_nothing() -> None:
    tree = PrefixTree((0,))
    assert tree.enter((1, 2), (page_ids(10),), 0) == ((), (), (), (), ())
    assert tree.match((1, 2)) == ()


def test_a_block_has_whole_pages_of_every_group_and_is_known_and_given_up_with_all_of_them() -> None:
    tree = PrefixTree((2, 3))
    pages = (page_ids(0, 1, 2, 3), page_ids(5, 6, 7))
    assert (tree.block_tokens, tree.counts(2), tree.blocks((7, 3)), tree.blocks_for((1, 3))) == (
        6,
        (6, 4),
        1,
        2,
    )
    assert tree.enter((1,) * 8, pages, 0).way == (0,)
    assert tree.pages((PageId(0),)) == ((0, 1, 2), (5, 6))
    again = tree.enter((1,) * 6, (page_ids(10, 11, 12), page_ids(10, 11)), 0)
    assert (again.way, again.spared) == ((0,), ((10, 11, 12), (10, 11)))
    for _ in range(2):
        tree.unpin(again.way)
    assert tree.evict(1) == ((0, 1, 2), (5, 6))


def test_divergence_detected_the_pages_of_every_group_are_in_the_digest() -> None:
    trees = [PrefixTree((2, 2)) for _ in range(2)]
    for place, tree in enumerate(trees):
        tree.enter((1, 2), (page_ids(3), page_ids(place)), 0)
    assert trees[0].digest != trees[1].digest


class Trees(RuleBasedStateMachine):
    """Two ranks' trees of two groups beside a plain model: the set of all known beginnings, by salt and
    tokens."""

    @initialize()
    def start(self) -> None:
        self.ranks = [PrefixTree((SIZE, 1)) for _ in range(2)]
        self.known: dict[tuple[int, tuple[int, ...]], PageId] = {}
        self.distrusted: set[PageId] = set()
        """Pages that exist but are not found any more."""
        self.rooms: dict[int, tuple[PageId, ...]] = {}
        self.fresh = 0
        self.next_room = 0

    def used(self) -> Counter[PageId]:
        return Counter(page for way in self.rooms.values() for page in way)

    @rule(tokens=st.lists(st.integers(1, 2), max_size=9).map(tuple), salt=st.sampled_from((0, SALT)))
    def begin(self, tokens: tuple[int, ...], salt: int) -> None:
        found = self.ranks[0].match(tokens, salt)
        expected = []
        for stop in range(SIZE, len(tokens) + 1, SIZE):
            if (salt, tokens[:stop]) not in self.known:
                break
            expected.append(self.known[salt, tokens[:stop]])
        assert found == tuple(expected)
        woken = [rank.pin(found) for rank in self.ranks]
        assert woken[0] == woken[1] == tuple(page for page in found if not self.used()[page])
        pages = (*expected, *page_ids(*range(self.fresh, self.fresh + len(tokens))))
        self.fresh += len(tokens)
        entered, other = (rank.enter(tokens, both(pages), len(found), salt) for rank in self.ranks)
        assert entered == other
        assert self.ranks[0].pages(entered.way) == both(entered.way)
        assert entered.spared == (), "what is known already was pinned"
        assert len(entered.way) == len(tokens) // SIZE
        assert entered.fresh == entered.way[len(found) :]
        for place, page in enumerate(entered.way):
            self.known.setdefault((salt, tokens[: (place + 1) * SIZE]), page)
        self.rooms[self.next_room] = entered.way
        self.next_room += 1

    @rule(pick=st.integers(0, 9))
    def end(self, pick: int) -> None:
        if self.rooms:
            room = sorted(self.rooms)[pick % len(self.rooms)]
            way = self.rooms.pop(room)
            idle = [rank.unpin(way) for rank in self.ranks]
            assert idle[0] == idle[1] == tuple(page for page in reversed(way) if not self.used()[page])

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        if count > self.ranks[0].evictable:
            with pytest.raises(OutOfPages):
                self.ranks[0].evict(count)
            return
        (gone, _), other = given_up = [rank.evict(count) for rank in self.ranks]
        assert given_up[0] == other == both(gone)
        assert not any(self.used()[page] for page in gone)
        self.known = {key: page for key, page in self.known.items() if page not in gone}
        self.distrusted -= set(gone)

    @rule(pick=st.integers(0, 9))
    def distrust(self, pick: int) -> None:
        if self.known:
            salt, tokens = sorted(self.known)[pick % len(self.known)]
            for rank in self.ranks:
                rank.distrust(self.known[salt, tokens])
            lost = [key for key in self.known if key[0] == salt and key[1][: len(tokens)] == tokens]
            self.distrusted |= {self.known.pop(key) for key in lost}

    @invariant()
    def every_known_beginning_can_be_reached(self) -> None:
        for salt, tokens in self.known:
            assert tokens[:-SIZE] == () or (salt, tokens[:-SIZE]) in self.known
            assert self.ranks[0].match(tokens, salt)[-1] == self.known[salt, tokens]

    @invariant()
    def users_are_counted(self) -> None:
        used = self.used()
        tree = self.ranks[0]
        pages = {*self.known.values(), *self.distrusted}
        assert {page: tree.users(page) for page in pages} == {page: used[page] for page in pages}
        assert tree.evictable == sum(not used[page] for page in pages)
        assert len(tree) == len(pages)
        assert tree.digest == self.ranks[1].digest


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
