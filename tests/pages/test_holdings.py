"""Does every room get back all that it held, however it ends, and is nothing free under a write?"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.ids import PageId, RoomId
from services.pages.errors import IllegalPageMove, OutOfPages, Truncated
from services.pages.holdings import Holding, Holdings, Standing
from services.pages.pool import PagePool, PageState
from services.pages.prefixes import PrefixTree
from services.pages.record import SLOT_BYTES
from services.pages.slots import SlotPool
from tests.pages.ids import page_ids

PAGES, SLOTS, PAGE_TOKENS = 8, 3, 2
EVERY_ROOM = [RoomId(room) for room in range(1, 6)]
TOKENS = (1, 2, 3, 4, 5)
"""Two whole pages, and one that is not."""


def holdings_of(pages: int = PAGES, slots: int = SLOTS) -> Holdings:
    memory = memoryview(bytearray(slots * SLOT_BYTES))
    return Holdings(PagePool(pages), SlotPool(memory), PrefixTree(PAGE_TOKENS))


def at_idle(holdings: Holdings) -> bool:
    pages = holdings.pages.census()
    return (
        (len(holdings), holdings.slots.free, holdings.available) == (0, SLOTS, PAGES)
        and pages[PageState.FREE] + pages[PageState.CACHED] == PAGES
        and pages[PageState.CACHED] == len(holdings.prefixes) == holdings.prefixes.evictable
    )


def received(holdings: Holdings, room: RoomId, pages: int = 4) -> Holding:
    """A receiver's room with TOKENS, from its reservation to its admission."""
    taken = holdings.take(room, pages, TOKENS)
    holdings.expose(room, 3 - taken.shared)
    holdings.commit(room)
    holdings.keep(room, TOKENS)
    return taken


@pytest.mark.parametrize("exposed", [0, 2, 3])
@pytest.mark.parametrize("end", ["unused", "committed", "quarantined"])
def test_exits_release_all(end: str, exposed: int) -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), 3)
    if end != "unused":
        holdings.expose(RoomId(7), exposed)
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
    holdings.take(RoomId(6), 1)
    with pytest.raises(OutOfPages):
        holdings.take(RoomId(7), 3)
    assert RoomId(7) not in holdings
    assert (holdings.pages.free, holdings.slots.free) == (pages - 1, slots - 1)


def test_a_failed_rooms_unexposed_pages_are_free_at_once() -> None:
    holdings = holdings_of()
    taken = holdings.take(RoomId(7), 5).pages
    holdings.expose(RoomId(7), 2)
    holdings.quarantine(RoomId(7))
    states = [holdings.pages.state(page) for page in taken]
    assert states == [PageState.QUARANTINED] * 2 + [PageState.FREE] * 3


def test_a_quarantined_room_of_no_pages_still_holds_its_slot() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), 2)
    holdings.expose(RoomId(7), 0)
    assert holdings.quarantine(RoomId(7))
    assert (holdings.pages.free, holdings.slots.free) == (PAGES, SLOTS - 1)


def test_nothing_to_fence_where_no_peer_was_told() -> None:
    holdings = holdings_of()
    assert not holdings.quarantine(RoomId(7))
    holdings.take(RoomId(7), 2)
    assert not holdings.quarantine(RoomId(7))
    assert holdings.get(RoomId(7)).standing is Standing.HELD


def test_no_free_under_write_exposed_memory_is_not_given_back() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), 2)
    holdings.expose(RoomId(7), 2)
    with pytest.raises(IllegalPageMove, match="committed or quarantined first"):
        holdings.give_back(RoomId(7))
    assert RoomId(7) in holdings


def test_no_truncation_more_than_is_held_is_not_exposed() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), 2)
    with pytest.raises(Truncated, match="3 pages to expose, 2 held"):
        holdings.expose(RoomId(7), 3)
    assert holdings.get(RoomId(7)).standing is Standing.HELD


def test_a_room_takes_once() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), 2)
    with pytest.raises(IllegalPageMove, match="already holds"):
        holdings.take(RoomId(7), 1)


def test_a_room_begins_with_the_pages_that_hold_its_first_tokens() -> None:
    holdings = holdings_of()
    first = received(holdings, RoomId(6)).pages
    holdings.give_back(RoomId(6))
    second = holdings.take(RoomId(7), 4, TOKENS)
    assert second.shared == 2
    assert second.pages[:2] == first[:2]
    assert holdings.expose(RoomId(7), 1).exposed == second.pages[2:3]


def test_shared_is_read_only_what_others_read_is_not_exposed() -> None:
    holdings = holdings_of()
    received(holdings, RoomId(6))
    second = holdings.take(RoomId(7), 4, TOKENS)
    holdings.expose(RoomId(7), 2)
    states = [holdings.pages.state(page) for page in second.pages]
    assert states == [PageState.COMMITTED] * 2 + [PageState.EXPOSED] * 2
    with pytest.raises(Truncated, match="3 pages to expose, 2 held"):
        holdings_with(second.shared).expose(RoomId(7), 3)


def holdings_with(shared: int) -> Holdings:
    """Room 7 holds 4 pages, of which so many were cached."""
    holdings = holdings_of()
    received(holdings, RoomId(6))
    holdings.give_back(RoomId(6))
    assert holdings.take(RoomId(7), 4, TOKENS).shared == shared
    return holdings


def test_shared_is_read_only_what_a_peer_may_write_is_not_shared() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(7), 3, TOKENS)
    holdings.expose(RoomId(7), 3)
    with pytest.raises(IllegalPageMove, match="exposed pages are not to be shared"):
        holdings.keep(RoomId(7), TOKENS)
    holdings.quarantine(RoomId(7))
    with pytest.raises(IllegalPageMove, match="quarantined pages are not to be shared"):
        holdings.keep(RoomId(7), TOKENS)


def test_a_failed_rooms_shared_pages_are_there_for_others_at_once() -> None:
    holdings = holdings_with(shared=2)
    holdings.expose(RoomId(7), 1)
    holdings.quarantine(RoomId(7))
    census = holdings.pages.census()
    assert (census[PageState.CACHED], census[PageState.QUARANTINED], census[PageState.FREE]) == (2, 1, 5)
    holdings.give_back(RoomId(7))
    assert at_idle(holdings)


def test_pages_of_a_room_that_is_not_trusted_are_begun_with_by_nobody_while_it_still_uses_them() -> None:
    holdings = holdings_with(shared=2)
    holdings.distrust(RoomId(7))
    assert holdings.take(RoomId(8), 4, TOKENS).shared == 0
    holdings.distrust(RoomId(8))
    holdings.give_back(RoomId(7))
    holdings.give_back(RoomId(8))
    holdings.distrust(RoomId(8))
    assert at_idle(holdings)


def test_what_a_room_shared_is_not_to_be_trusted_less_once_nobody_knows_what_it_was() -> None:
    holdings = holdings_with(shared=2)
    holdings.expose(RoomId(7), 1)
    holdings.distrust(RoomId(7))
    holdings.quarantine(RoomId(7))
    assert holdings.take(RoomId(8), 4, TOKENS).shared == 0
    with pytest.raises(IllegalPageMove, match="room 7: what it shared is not known any more"):
        holdings.distrust(RoomId(7))


def test_cached_pages_are_given_up_where_space_is_needed_and_those_in_use_are_not() -> None:
    holdings = holdings_with(shared=2)
    assert (holdings.available, holdings.prefixes.evictable) == (4, 0)
    received(holdings, RoomId(8), pages=4)
    holdings.give_back(RoomId(8))
    holdings.give_back(RoomId(7))
    assert (holdings.pages.free, holdings.available) == (6, PAGES)
    holdings.take(RoomId(9), 7)
    assert len(holdings.prefixes.match(TOKENS)) == len(holdings.prefixes) == 1
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 available of 8"):
        holdings.take(RoomId(10), 2)


def test_promise_kept_space_is_made_of_other_pages_than_those_a_room_begins_with() -> None:
    holdings = holdings_with(shared=2)
    holdings.give_back(RoomId(7))
    holdings.take(RoomId(8), 2)
    holdings.keep(RoomId(8), (9, 9, 9, 9))
    holdings.give_back(RoomId(8))
    taken = holdings.take(RoomId(9), 7, TOKENS)
    assert taken.pages[:2] == holdings.prefixes.match(TOKENS)
    assert len(set(taken.pages)) == 7
    assert len(holdings.prefixes.match((9, 9, 9, 9))) == 1


def test_the_pages_of_two_rooms_that_hold_the_same_are_given_back() -> None:
    holdings = holdings_of()
    holdings.take(RoomId(6), 3, TOKENS)
    holdings.take(RoomId(7), 3, TOKENS)
    first, second = (holdings.keep(RoomId(room), TOKENS) for room in (6, 7))
    assert first.pages[:2] == second.pages[:2]
    assert holdings.available == PAGES - 4, "the second goes on with the pages of the first"
    assert [holdings.prefixes.users(page) for page in holdings.prefixes.match(TOKENS)] == [2, 2]
    holdings.give_back(RoomId(6))
    assert holdings.prefixes.evictable == 0
    holdings.give_back(RoomId(7))
    assert at_idle(holdings)
    assert len(holdings.prefixes) == 2


def test_same_root_only_a_room_shares_with_those_of_its_salt() -> None:
    holdings = holdings_of(pages=12)
    rooms = [(RoomId(salt + 1), salt) for salt in (0, 1, 2)]
    for room, salt in rooms:
        assert holdings.take(room, 3, TOKENS, salt).shared == 0
        holdings.keep(room, TOKENS)
        holdings.give_back(room)
    again = [holdings.take(room, 3, TOKENS, salt) for room, salt in rooms]
    assert [each.shared for each in again] == [2, 2, 2]
    assert len({page for each in again for page in each.pages}) == 9


class HoldingsMachine(RuleBasedStateMachine):
    """Rooms come and go in every way, and a writer writes wherever it was ever told and not fenced off."""

    @initialize()
    def start(self) -> None:
        self.holdings = holdings_of()
        self.writable: dict[RoomId, frozenset[PageId]] = {}
        """By room: pages that its sender may still write to."""
        self.salts: dict[RoomId, int] = {}
        self.tokens: dict[RoomId, tuple[int, ...]] = {}
        """Of the rooms that hold pages."""
        self.contents: dict[PageId, tuple[int, ...]] = {}
        """By page: under which salt, what lies there, and all that it was computed from."""
        self.distrusted: set[PageId] = set()
        """Pages that are known, and that nobody is to begin with."""

    def fill(self, room: RoomId) -> None:
        """The room's own pages hold its tokens."""
        holding = self.holdings.get(room)
        for place in range(holding.shared, len(holding.pages)):
            page = holding.pages[place]
            self.contents[page] = (self.salts[room], *self.tokens[room][: (place + 1) * PAGE_TOKENS])

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
                self.holdings.take(room, pages, tokens, salt)
            return
        available, slots = self.holdings.available, self.holdings.slots.free
        try:
            holding = self.holdings.take(room, pages, tokens, salt)
        except OutOfPages:
            assert pages > available or slots == 0, "what fits without sharing is never refused"
            assert (self.holdings.available, self.holdings.slots.free) == (available, slots)
            return
        assert self.distrusted.isdisjoint(holding.pages[: holding.shared])
        self.distrusted = {page for page in self.distrusted if page in self.holdings.prefixes}
        self.tokens[room], self.salts[room] = tokens, salt
        assert len(holding.pages) == pages
        for place, page in enumerate(holding.pages[: holding.shared]):
            assert self.contents[page] == (salt, *tokens[: (place + 1) * PAGE_TOKENS])
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
        available, tokens, salt = self.holdings.available, self.tokens[room], self.salts[room]
        holding = self.holdings.keep(room, tokens)
        assert self.holdings.available >= available, "who was promised pages gets them"
        for place, page in enumerate(holding.pages[: holding.shared]):
            assert self.contents[page] == (salt, *tokens[: (place + 1) * PAGE_TOKENS])

    @rule(room=st.sampled_from(EVERY_ROOM), share=st.integers(0, PAGES))
    def expose(self, room: RoomId, share: int) -> None:
        if room in self.holdings and self.holdings.get(room).standing is Standing.HELD:
            holding = self.holdings.get(room)
            self.holdings.expose(room, min(share, len(holding.pages) - holding.shared))
            self.writable[room] = frozenset(holding.exposed)

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

    @rule(room=st.sampled_from(EVERY_ROOM))
    def distrust(self, room: RoomId) -> None:
        if room in self.holdings and self.holdings.get(room).standing is Standing.QUARANTINED:
            with pytest.raises(IllegalPageMove):
                self.holdings.distrust(room)
            return
        self.holdings.distrust(room)
        if room in self.holdings:
            holding = self.holdings.get(room)
            self.distrusted |= set(holding.pages[: holding.shared])

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
        held = room in self.holdings
        assert self.holdings.give_back(room) == held
        assert room not in self.holdings

    @invariant()
    def every_page_has_one_owner_or_none(self) -> None:
        held = [
            page
            for room in EVERY_ROOM
            if room in self.holdings
            for page in self.holdings.get(room).pages
            if page not in self.holdings.prefixes
        ]
        assert len(held) == len(set(held))
        assert len(held) + len(self.holdings.prefixes) + self.holdings.pages.free == PAGES
        assert len(self.holdings) + self.holdings.slots.free == SLOTS

    @invariant()
    def what_may_be_written_is_exposed_or_quarantined(self) -> None:
        for pages in self.writable.values():
            for page in pages:
                assert self.holdings.pages.state(page) in (PageState.EXPOSED, PageState.QUARANTINED)

    @invariant()
    def what_is_known_is_committed_while_it_is_used_and_cached_otherwise(self) -> None:
        rooms = [self.holdings.get(room) for room in EVERY_ROOM if room in self.holdings]
        for page in page_ids(*range(PAGES)):
            state = self.holdings.pages.state(page)
            if page in self.holdings.prefixes:
                users = sum(page in holding.pages for holding in rooms)
                assert self.holdings.prefixes.users(page) == users
                assert state is (PageState.COMMITTED if users else PageState.CACHED)
            else:
                assert state is not PageState.CACHED

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
