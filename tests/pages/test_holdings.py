"""Does every room get back all that it held, however it ends, and is nothing free under a write?"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.pages.errors import IllegalPageMove, OutOfPages, Truncated
from services.pages.holdings import Holdings, Standing
from services.pages.pool import PagePool, PageState
from services.pages.record import SLOT_BYTES
from services.pages.slots import SlotPool

PAGES, SLOTS, ROOMS = 8, 3, 5


def holdings_of(pages: int = PAGES, slots: int = SLOTS) -> Holdings:
    return Holdings(PagePool(pages), SlotPool(memoryview(bytearray(slots * SLOT_BYTES))))


def at_idle(holdings: Holdings) -> bool:
    return len(holdings) == 0 and (holdings.pages.free, holdings.slots.free) == (PAGES, SLOTS)


@pytest.mark.parametrize("exposed", [0, 2, 3])
@pytest.mark.parametrize("end", ["unused", "committed", "quarantined"])
def test_exits_release_all(end: str, exposed: int) -> None:
    holdings = holdings_of()
    holdings.take(7, 3)
    if end != "unused":
        holdings.expose(7, exposed)
    if end == "committed":
        holdings.commit(7)
    if end == "quarantined":
        assert holdings.quarantine(7)
    assert holdings.give_back(7)
    assert not holdings.give_back(7)
    assert at_idle(holdings)


@pytest.mark.parametrize(("pages", "slots"), [(3, 3), (2, 1)], ids=["no pages", "no slot"])
def test_what_cannot_be_taken_is_not_taken_at_all(pages: int, slots: int) -> None:
    holdings = holdings_of(pages, slots)
    holdings.take(6, 1)
    assert not holdings.can_take(3)
    with pytest.raises(OutOfPages):
        holdings.take(7, 3)
    assert 7 not in holdings
    assert (holdings.pages.free, holdings.slots.free) == (pages - 1, slots - 1)


def test_a_failed_rooms_unexposed_pages_are_free_at_once() -> None:
    holdings = holdings_of()
    taken = holdings.take(7, 5).pages
    holdings.expose(7, 2)
    holdings.quarantine(7)
    states = [holdings.pages.state(page) for page in taken]
    assert states == [PageState.QUARANTINED] * 2 + [PageState.FREE] * 3


def test_a_quarantined_room_of_no_pages_still_holds_its_slot() -> None:
    holdings = holdings_of()
    holdings.take(7, 2)
    holdings.expose(7, 0)
    assert holdings.quarantine(7)
    assert (holdings.pages.free, holdings.slots.free) == (PAGES, SLOTS - 1)


def test_nothing_to_fence_where_no_peer_was_told() -> None:
    holdings = holdings_of()
    assert not holdings.quarantine(7)
    holdings.take(7, 2)
    assert not holdings.quarantine(7)
    assert holdings.get(7).standing is Standing.HELD


def test_no_free_under_write_exposed_memory_is_not_given_back() -> None:
    holdings = holdings_of()
    holdings.take(7, 2)
    holdings.expose(7, 2)
    with pytest.raises(IllegalPageMove, match="committed or quarantined first"):
        holdings.give_back(7)
    assert 7 in holdings


def test_no_truncation_more_than_is_held_is_not_exposed() -> None:
    holdings = holdings_of()
    holdings.take(7, 2)
    with pytest.raises(Truncated, match="3 pages to expose, 2 held"):
        holdings.expose(7, 3)
    assert holdings.get(7).standing is Standing.HELD


def test_a_room_takes_once() -> None:
    holdings = holdings_of()
    holdings.take(7, 2)
    with pytest.raises(IllegalPageMove, match="already holds"):
        holdings.take(7, 1)


class Rooms(RuleBasedStateMachine):
    """Rooms come and go in every way, and a writer writes wherever it was ever told and not fenced off."""

    @initialize()
    def start(self) -> None:
        self.memory = bytearray(SLOTS * SLOT_BYTES)
        self.holdings = Holdings(PagePool(PAGES), SlotPool(memoryview(self.memory)))
        self.writable: dict[int, frozenset[int]] = {}
        """By room: pages that its sender may still write to."""

    @rule(room=st.integers(1, ROOMS), pages=st.integers(0, PAGES))
    def take(self, room: int, pages: int) -> None:
        if room in self.holdings or not self.holdings.can_take(pages):
            with pytest.raises((IllegalPageMove, OutOfPages)):
                self.holdings.take(room, pages)
            return
        holding = self.holdings.take(room, pages)
        assert len(holding.pages) == pages
        assert bytes(self.holdings.slots.view(holding.slot)) == bytes(SLOT_BYTES)

    @rule(room=st.integers(1, ROOMS), share=st.integers(0, PAGES))
    def expose(self, room: int, share: int) -> None:
        if room in self.holdings and self.holdings.get(room).standing is Standing.HELD:
            holding = self.holdings.get(room)
            self.holdings.expose(room, min(share, len(holding.pages)))
            self.writable[room] = frozenset(holding.exposed)

    @rule(room=st.integers(1, ROOMS))
    def write_late(self, room: int) -> None:
        if room in self.writable and room in self.holdings:
            self.holdings.slots.view(self.holdings.get(room).slot)[:] = b"\x55" * SLOT_BYTES

    @rule(room=st.integers(1, ROOMS))
    def commit(self, room: int) -> None:
        if room in self.holdings and self.holdings.get(room).standing is Standing.EXPOSED:
            self.holdings.commit(room)
            del self.writable[room]

    @rule(room=st.integers(1, ROOMS))
    def fail(self, room: int) -> None:
        if room not in self.holdings or self.holdings.get(room).standing in (Standing.HELD, Standing.EXPOSED):
            assert self.holdings.quarantine(room) == (room in self.writable)

    @rule(room=st.integers(1, ROOMS), proof=st.booleans())
    def give_back(self, room: int, proof: bool) -> None:
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
            for room in range(1, ROOMS + 1)
            if room in self.holdings
            for page in self.holdings.get(room).pages
        ]
        assert len(held) == len(set(held))
        assert len(held) + self.holdings.pages.free == PAGES
        assert len(self.holdings) + self.holdings.slots.free == SLOTS

    @invariant()
    def what_may_be_written_is_exposed_or_quarantined(self) -> None:
        for pages in self.writable.values():
            for page in pages:
                assert self.holdings.pages.state(page) in (PageState.EXPOSED, PageState.QUARANTINED)

    @invariant()
    def writers_never_share_a_page(self) -> None:
        pages = [page for each in self.writable.values() for page in each]
        assert len(pages) == len(set(pages))

    def teardown(self) -> None:
        for room in range(1, ROOMS + 1):
            if room in self.holdings and self.holdings.get(room).standing is Standing.EXPOSED:
                self.holdings.quarantine(room)
            self.holdings.give_back(room)
        assert at_idle(self.holdings)


TestRooms = Rooms.TestCase
TestRooms.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
