"""Tests that a room gives back all that it held, however it ends, and that no page is free while a peer may
write it."""

from operator import add, ge, gt, sub

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.ids import PageCounts, PageId, PageTables, RoomId
from baton.pages.errors import IllegalPageMove, OutOfPages, Truncated
from baton.pages.holding import Holding, Standing
from baton.pages.holdings import Holdings
from baton.pages.pool import PagePool, PageState
from baton.pages.prefix_tree import PrefixTree
from baton.pages.record import SLOT_BYTES
from baton.pages.slots import SlotPool
from tests.pages.ids import page_ids

PAGES, SLOTS, PAGE_TOKENS = 8, 3, 2
EACH = (1, 2)
"""Pages of each group in a block of PAGE_TOKENS tokens: the second group's pages hold one."""
EVERY_ROOM = [RoomId(room) for room in range(1, 6)]
TOKENS = (1, 2, 3, 4, 5)
"""A prompt of two whole pages and one that is not full."""


def of(blocks: int) -> PageCounts:
    """Return the number of pages of so many blocks, by group."""
    return tuple(blocks * each for each in EACH)


def holdings_of(blocks: int = PAGES, slots: int = SLOTS) -> Holdings:
    memory = memoryview(bytearray(slots * SLOT_BYTES))
    pools = [PagePool(count) for count in of(blocks)]
    return Holdings(pools, SlotPool(memory), PrefixTree([PAGE_TOKENS // each for each in EACH]))


def at_idle(holdings: Holdings) -> bool:
    pages, known = holdings.census(), sum(of(len(holdings.prefixes)))
    return (
        (len(holdings), holdings.slots.free, holdings.available) == (0, SLOTS, of(PAGES))
        and pages[PageState.FREE] + pages[PageState.CACHED] == sum(of(PAGES))
        and pages[PageState.CACHED] == known == sum(of(holdings.prefixes.evictable))
    )


def cut(pages: PageTables, begin: int, end: int) -> PageTables:
    """Return the pages of the room's blocks from `begin` up to `end`, by group."""
    return tuple(table[begin * each : end * each] for table, each in zip(pages, EACH, strict=True))


def free(holdings: Holdings) -> PageCounts:
    return tuple(pool.free for pool in holdings.pools)


Named = tuple[int, PageId]
"""A group and one of its pages."""


def named(pages: PageTables) -> list[Named]:
    return [(group, page) for group, table in enumerate(pages) for page in table]


def states(holdings: Holdings, pages: PageTables) -> list[list[PageState]]:
    """Return the state of each page, by group."""
    return [[pool.state(page) for page in table] for pool, table in zip(holdings.pools, pages, strict=True)]


def received(holdings: Holdings, room: RoomId, pages: int = 4) -> Holding:
    """Take a receiver's room with TOKENS from its reservation to its admission."""
    taken = holdings.take(room, of(pages), TOKENS)
    holdings.expose(room, of(3 - taken.shared[0]))
    holdings.commit(room)
    holdings.keep(room, TOKENS)
    return taken


@pytest.mark.parametrize("exposed", [0, 2, 3])
@pytest.mark.parametrize("end", ["unused", "committed", "quarantined"])
def test_exits_release_all(end: str, exposed: int) -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), of(3))
    if end != "unused":
        holdings.expose(RoomId(7), of(exposed))
    if end == "committed":
        holdings.commit(RoomId(7))
    if end == "quarantined":
        assert holdings.quarantine(RoomId(7))
    assert holdings.give_back(RoomId(7))
    assert not holdings.give_back(RoomId(7))
    assert at_idle(holdings)


@pytest.mark.parametrize(("pages", "slots"), [(3, 3), (2, 1)], ids=["no pages", "no slot"])
def test_what_cannot_be_taken_is_not_taken_at_all(pages: int, slots: int) -> None:
    holdings = holdings_of(pages, slots)
    holdings.take(RoomId(6), of(1))
    with pytest.raises(OutOfPages):
        holdings.take(RoomId(7), of(3))
    assert RoomId(7) not in holdings
    assert (free(holdings), holdings.slots.free) == (of(pages - 1), slots - 1)


def test_a_failed_rooms_unexposed_pages_are_free_at_once() -> None:
    holdings = holdings_of()
    taken = holdings.take(RoomId(7), of(5)).pages
    holdings.expose(RoomId(7), of(2))
    holdings.quarantine(RoomId(7))
    assert states(holdings, taken) == [
        [PageState.QUARANTINED] * 2 * each + [PageState.FREE] * 3 * each for each in EACH
    ]


def test_a_quarantined_room_of_no_pages_still_holds_its_slot() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), of(2))
    holdings.expose(RoomId(7), of(0))
    assert holdings.quarantine(RoomId(7))
    assert (free(holdings), holdings.slots.free) == (of(PAGES), SLOTS - 1)


def test_nothing_to_fence_where_no_peer_was_told() -> None:
    holdings = holdings_of()
    assert not holdings.quarantine(RoomId(7))
    holdings.take(RoomId(7), of(2))
    assert not holdings.quarantine(RoomId(7))
    assert holdings.get(RoomId(7)).standing is Standing.HELD


def test_no_free_under_write_exposed_memory_is_not_given_back() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), of(2))
    holdings.expose(RoomId(7), of(2))
    with pytest.raises(IllegalPageMove, match="committed or quarantined first"):
        holdings.give_back(RoomId(7))
    assert RoomId(7) in holdings


def test_no_truncation_more_than_is_held_is_not_exposed() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), of(2))
    with pytest.raises(Truncated, match=r"3 \+ 6 pages to expose, 2 \+ 4 held"):
        holdings.expose(RoomId(7), of(3))
    assert holdings.get(RoomId(7)).standing is Standing.HELD


def test_a_room_takes_once() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), of(2))
    with pytest.raises(IllegalPageMove, match="already holds"):
        holdings.take(RoomId(7), of(1))


def test_a_room_begins_with_the_pages_that_hold_its_first_tokens() -> None:
    holdings = holdings_of()
    first = received(holdings, RoomId(6)).pages
    holdings.give_back(RoomId(6))
    second = holdings.take(RoomId(7), of(4), TOKENS)
    assert (second.shared, second.shared_tokens) == (of(2), 2 * PAGE_TOKENS)
    assert cut(second.pages, 0, 2) == cut(first, 0, 2)
    assert holdings.expose(RoomId(7), of(1)).exposed == cut(second.pages, 2, 3)


def test_shared_is_read_only_what_others_read_is_not_exposed() -> None:
    holdings = holdings_of()
    received(holdings, RoomId(6))
    second = holdings.take(RoomId(7), of(4), TOKENS)
    holdings.expose(RoomId(7), of(2))
    assert states(holdings, second.pages) == [
        [PageState.COMMITTED] * 2 * each + [PageState.EXPOSED] * 2 * each for each in EACH
    ]
    with pytest.raises(Truncated, match=r"3 \+ 6 pages to expose, 2 \+ 4 held"):
        holdings_with(shared=2).expose(RoomId(7), of(3))


def holdings_with(shared: int) -> Holdings:
    """Return holdings in which room 7 holds 4 blocks, of which `shared` were cached."""
    holdings = holdings_of()
    received(holdings, RoomId(6))
    holdings.give_back(RoomId(6))
    assert holdings.take(RoomId(7), of(4), TOKENS).shared == of(shared)
    return holdings


def test_shared_is_read_only_what_a_peer_may_write_is_not_shared() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), of(3), TOKENS)
    holdings.expose(RoomId(7), of(3))
    with pytest.raises(IllegalPageMove, match="exposed pages are not to be shared"):
        holdings.keep(RoomId(7), TOKENS)
    holdings.quarantine(RoomId(7))
    with pytest.raises(IllegalPageMove, match="quarantined pages are not to be shared"):
        holdings.keep(RoomId(7), TOKENS)


def test_a_failed_rooms_shared_pages_are_there_for_others_at_once() -> None:
    holdings = holdings_with(shared=2)
    holdings.expose(RoomId(7), of(1))
    holdings.quarantine(RoomId(7))
    census = holdings.census()
    assert (census[PageState.CACHED], census[PageState.QUARANTINED], census[PageState.FREE]) == (
        2 * 3,
        1 * 3,
        5 * 3,
    )
    holdings.give_back(RoomId(7))
    assert at_idle(holdings)


def test_pages_of_a_room_that_is_not_trusted_are_begun_with_by_nobody_while_it_still_uses_them() -> None:
    holdings = holdings_with(shared=2)
    holdings.distrust(RoomId(7))
    assert holdings.take(RoomId(8), of(4), TOKENS).shared == of(0)
    holdings.distrust(RoomId(8))
    holdings.give_back(RoomId(7))
    holdings.give_back(RoomId(8))
    holdings.distrust(RoomId(8))
    assert at_idle(holdings)


def test_what_a_room_shared_is_not_to_be_trusted_less_once_nobody_knows_what_it_was() -> None:
    holdings = holdings_with(shared=2)
    holdings.expose(RoomId(7), of(1))
    holdings.distrust(RoomId(7))
    holdings.quarantine(RoomId(7))
    assert holdings.take(RoomId(8), of(4), TOKENS).shared == of(0)
    with pytest.raises(IllegalPageMove, match="room 7: what it shared is not known any more"):
        holdings.distrust(RoomId(7))


def test_cached_pages_are_given_up_where_space_is_needed_and_those_in_use_are_not() -> None:
    holdings = holdings_with(shared=2)
    assert (holdings.available, holdings.prefixes.evictable) == (of(4), 0)
    received(holdings, RoomId(8), pages=4)
    holdings.give_back(RoomId(8))
    holdings.give_back(RoomId(7))
    assert (free(holdings), holdings.available) == (of(6), of(PAGES))
    holdings.take(RoomId(9), of(7))
    assert len(holdings.prefixes.match(TOKENS)) == len(holdings.prefixes) == 1
    with pytest.raises(OutOfPages, match=r"2 \+ 4 pages asked for, 1 \+ 2 available of 8 \+ 16"):
        holdings.take(RoomId(10), of(2))


def test_promise_kept_space_is_made_of_other_pages_than_those_a_room_begins_with() -> None:
    holdings = holdings_with(shared=2)
    holdings.give_back(RoomId(7))
    holdings.take(RoomId(8), of(2))
    holdings.keep(RoomId(8), (9, 9, 9, 9))
    holdings.give_back(RoomId(8))
    taken = holdings.take(RoomId(9), of(7), TOKENS)
    assert cut(taken.pages, 0, 2) == holdings.prefixes.pages(holdings.prefixes.match(TOKENS))
    assert tuple(len(set(table)) for table in taken.pages) == of(7)
    assert len(holdings.prefixes.match((9, 9, 9, 9))) == 1


def test_the_pages_of_two_rooms_that_hold_the_same_are_given_back() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(6), of(3), TOKENS)
    holdings.take(RoomId(7), of(3), TOKENS)
    first, second = (holdings.keep(RoomId(room), TOKENS) for room in (6, 7))
    assert cut(first.pages, 0, 2) == cut(second.pages, 0, 2)
    assert holdings.available == of(PAGES - 4), "the second goes on with the pages of the first"
    assert [holdings.prefixes.users(page) for page in holdings.prefixes.match(TOKENS)] == [2, 2]
    holdings.give_back(RoomId(6))
    assert holdings.prefixes.evictable == 0
    holdings.give_back(RoomId(7))
    assert at_idle(holdings)
    assert len(holdings.prefixes) == 2


def test_oldest_goes_on_what_a_room_would_give_back_is_what_nobody_else_reads() -> None:
    holdings = holdings_of()
    received(holdings, RoomId(6))
    assert holdings.returning(RoomId(6)) == of(4)
    holdings.take(RoomId(7), of(4), TOKENS)
    assert [holdings.returning(room) for room in (RoomId(6), RoomId(7))] == [of(2)] * 2
    holdings.give_back(RoomId(6))
    assert holdings.returning(RoomId(7)) == of(4)


def test_same_root_only_a_room_shares_with_those_of_its_salt() -> None:
    holdings = holdings_of(blocks=12)
    rooms = [(RoomId(salt + 1), salt) for salt in (0, 1, 2)]
    for room, salt in rooms:
        assert holdings.take(room, of(3), TOKENS, salt).shared == of(0)
        holdings.keep(room, TOKENS)
        holdings.give_back(room)
    again = [holdings.take(room, of(3), TOKENS, salt) for room, salt in rooms]
    assert [each.shared for each in again] == [of(2)] * 3
    assert len({page for each in again for page in each.pages[0]}) == 9


class HoldingsMachine(RuleBasedStateMachine):
    """Rooms come and go in every way, and a writer writes wherever it was ever told and not fenced off."""

    @initialize()
    def start(self) -> None:
        self.holdings = holdings_of()
        self.writable: dict[RoomId, frozenset[Named]] = {}
        """Pages that a room's sender may still write to, by room."""
        self.salts: dict[RoomId, int] = {}
        self.tokens: dict[RoomId, tuple[int, ...]] = {}
        """Tokens of each room that holds pages, by room."""
        self.contents: dict[Named, tuple[int, ...]] = {}
        """Expected content of each page: its salt, then all tokens it was computed from."""
        self.distrusted: set[PageId] = set()
        """Blocks that are known, but that no new room may begin with."""

    def fill(self, room: RoomId) -> None:
        """Record that the room's own pages hold its tokens."""
        holding = self.holdings.get(room)
        for group, (table, shared) in enumerate(zip(holding.pages, holding.shared, strict=True)):
            for place in range(shared, len(table)):
                self.contents[group, table[place]] = self.expected(room, group, place)

    def expected(self, room: RoomId, group: int, place: int) -> tuple[int, ...]:
        """Return the content that page `place` of the room in this group has to have."""
        return (self.salts[room], *self.tokens[room][: (place + 1) * PAGE_TOKENS // EACH[group]])

    def check_shared(self, room: RoomId) -> None:
        holding = self.holdings.get(room)
        for group, (table, shared) in enumerate(zip(holding.pages, holding.shared, strict=True)):
            for place, page in enumerate(table[:shared]):
                assert self.contents[group, page] == self.expected(room, group, place)

    def way(self, holding: Holding) -> tuple[PageId, ...]:
        """The blocks that it shares."""
        return holding.pages[0][: holding.shared[0]]

    @rule(
        room=st.sampled_from(EVERY_ROOM),
        pages=st.integers(0, PAGES),
        tokens=st.lists(st.integers(1, 2), max_size=2 * PAGES).map(tuple),
        salt=st.integers(0, 1),
    )
    def take(self, room: RoomId, pages: int, tokens: tuple[int, ...], salt: int) -> None:
        tokens = tokens[: pages * PAGE_TOKENS]
        if room in self.holdings:
            with pytest.raises(IllegalPageMove):
                self.holdings.take(room, of(pages), tokens, salt)
            return
        available, slots = self.holdings.available, self.holdings.slots.free
        try:
            holding = self.holdings.take(room, of(pages), tokens, salt)
        except OutOfPages:
            short = any(map(gt, of(pages), available)) or slots == 0
            assert short, "what fits without sharing is never refused"
            assert (self.holdings.available, self.holdings.slots.free) == (available, slots)
            return
        assert self.distrusted.isdisjoint(self.way(holding))
        self.distrusted = {page for page in self.distrusted if page in self.holdings.prefixes}
        self.tokens[room], self.salts[room] = tokens, salt
        assert tuple(map(len, holding.pages)) == of(pages)
        self.check_shared(room)
        assert bytes(self.holdings.slots.view(holding.slot)) == bytes(SLOT_BYTES)

    @rule(room=st.sampled_from(EVERY_ROOM))
    def keep(self, room: RoomId) -> None:
        if room not in self.holdings:
            return
        if self.holdings.get(room).standing in (Standing.EXPOSED, Standing.QUARANTINED):
            with pytest.raises(IllegalPageMove):
                self.holdings.keep(room, self.tokens[room])
            return
        self.fill(room)
        available = self.holdings.available
        self.holdings.keep(room, self.tokens[room])
        assert all(map(ge, self.holdings.available, available)), "who was promised pages gets them"
        self.check_shared(room)

    @rule(room=st.sampled_from(EVERY_ROOM), share=st.integers(0, PAGES))
    def expose(self, room: RoomId, share: int) -> None:
        if room in self.holdings and self.holdings.get(room).standing is Standing.HELD:
            holding = self.holdings.get(room)
            self.holdings.expose(room, of(min(share, len(holding.pages[0]) - holding.shared[0])))
            self.writable[room] = frozenset(named(holding.exposed))

    @rule(room=st.sampled_from(EVERY_ROOM))
    def write_late(self, room: RoomId) -> None:
        if room in self.writable and room in self.holdings:
            self.holdings.slots.view(self.holdings.get(room).slot)[:] = b"\x55" * SLOT_BYTES
            self.contents.update(dict.fromkeys(self.writable[room], (-room,)))

    @rule(room=st.sampled_from(EVERY_ROOM))
    def commit(self, room: RoomId) -> None:
        if room in self.holdings and self.holdings.get(room).standing is Standing.EXPOSED:
            self.holdings.commit(room)
            self.fill(room)
            del self.writable[room]

    @rule(
        room=st.sampled_from(EVERY_ROOM),
        pages=st.tuples(st.integers(0, 3), st.integers(0, 3)),
        choice=st.integers(0, 2),
    )
    def grow(self, room: RoomId, pages: PageCounts, choice: int) -> None:
        if room not in self.holdings:
            return
        holding, before = self.holdings.get(room), self.holdings.available
        if holding.standing is not Standing.COMMITTED:
            with pytest.raises(IllegalPageMove):
                self.holdings.grow(room, pages, choice)
        elif any(map(gt, pages, before)):
            with pytest.raises(OutOfPages):
                self.holdings.grow(room, pages, choice)
        else:
            had = holding.pages
            fresh = self.holdings.grow(room, pages, choice)
            assert tuple(map(len, fresh)) == pages
            assert {each for group in states(self.holdings, fresh) for each in group} <= {PageState.COMMITTED}
            assert holding.pages == (had if choice else tuple(map(add, had, fresh)))
            before = tuple(map(sub, before, pages))
            self.fill(room)
        assert self.holdings.available == before, "no more is taken than is asked for"

    @rule(room=st.sampled_from(EVERY_ROOM))
    def distrust(self, room: RoomId) -> None:
        if room in self.holdings and self.holdings.get(room).standing is Standing.QUARANTINED:
            with pytest.raises(IllegalPageMove):
                self.holdings.distrust(room)
            return
        self.holdings.distrust(room)
        if room in self.holdings:
            holding = self.holdings.get(room)
            self.distrusted |= set(self.way(holding))

    @rule(room=st.sampled_from(EVERY_ROOM))
    def fail(self, room: RoomId) -> None:
        if room not in self.holdings or self.holdings.get(room).standing in (Standing.HELD, Standing.EXPOSED):
            assert self.holdings.quarantine(room) == (room in self.writable)

    @rule(room=st.sampled_from(EVERY_ROOM), proof=st.booleans())
    def give_back(self, room: RoomId, proof: bool) -> None:
        if room in self.writable:
            if self.holdings.get(room).standing is Standing.EXPOSED:
                with pytest.raises(IllegalPageMove):
                    self.holdings.give_back(room)
                return
            if not proof:
                return
            del self.writable[room]
        held, before = room in self.holdings, self.holdings.available
        back = self.holdings.returning(room) if held else of(0)
        assert self.holdings.give_back(room) == held
        assert tuple(map(sub, self.holdings.available, before)) == back
        assert room not in self.holdings

    @invariant()
    def every_page_has_one_owner_or_none(self) -> None:
        rooms = [self.holdings.get(room) for room in EVERY_ROOM if room in self.holdings]
        known = of(len(self.holdings.prefixes))
        for group, pool in enumerate(self.holdings.pools):
            held = [page for holding in rooms for page in holding.own[group]]
            held += [
                page for holding in rooms for tables in holding.further.values() for page in tables[group]
            ]
            assert len(held) == len(set(held))
            assert len(held) + known[group] + pool.free == len(pool)
        assert len(self.holdings) + self.holdings.slots.free == SLOTS

    @invariant()
    def what_may_be_written_is_exposed_or_quarantined(self) -> None:
        for pages in self.writable.values():
            for group, page in pages:
                state = self.holdings.pools[group].state(page)
                assert state in (PageState.EXPOSED, PageState.QUARANTINED)

    @invariant()
    def what_is_known_is_committed_while_it_is_used_and_cached_otherwise(self) -> None:
        rooms = [self.holdings.get(room) for room in EVERY_ROOM if room in self.holdings]
        prefixes, cached = self.holdings.prefixes, set[Named]()
        for block in page_ids(*range(PAGES)):
            if block in prefixes:
                users = sum(block in self.way(holding) for holding in rooms)
                assert prefixes.users(block) == users
                pages = prefixes.pages((block,))
                state = PageState.COMMITTED if users else PageState.CACHED
                assert {each for group in states(self.holdings, pages) for each in group} == {state}
                cached |= set() if users else set(named(pages))
        assert len(cached) == self.holdings.census()[PageState.CACHED]

    @invariant()
    def writers_never_share_a_page(self) -> None:
        pages = [page for each in self.writable.values() for page in each]
        assert len(pages) == len(set(pages))

    def teardown(self) -> None:
        for room in EVERY_ROOM:
            if room in self.holdings and self.holdings.get(room).standing is Standing.EXPOSED:
                self.holdings.quarantine(room)
            self.holdings.give_back(room)
        assert at_idle(self.holdings)


TestRooms = HoldingsMachine.TestCase
TestRooms.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
