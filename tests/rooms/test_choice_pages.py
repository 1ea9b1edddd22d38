"""Tests that a room's choices share the pages that all of them read, and no page that one of them writes."""

from itertools import combinations
from math import lcm
from operator import add

from hypothesis import given
from hypothesis import strategies as st

from baton.ids import PageTables, RoomId
from baton.pages.holdings import Holdings
from baton.pages.pool import PagePool
from baton.pages.record import SLOT_BYTES
from baton.pages.slots import SlotPool
from baton.rooms.choice_pages import ChoicePages

ROOM = RoomId(1)

Place = tuple[int, int]
"""A group and one of its pages."""


@st.composite
def divisions(draw: st.DrawFn) -> ChoicePages:
    """Draw a division of a room's pages among its choices, with one or two KV groups."""
    known, sizes = draw(st.integers(1, 40)), st.lists(st.integers(1, 9), min_size=1, max_size=2)
    return ChoicePages(known, known + draw(st.integers(0, 40)), draw(st.integers(1, 6)), tuple(draw(sizes)))


def of(pages: PageTables) -> set[Place]:
    return {(group, page) for group, table in enumerate(pages) for page in table}


def grown(division: ChoicePages) -> list[PageTables]:
    """Return the page tables of all choices when each is as long as it may get, so that no page is left
    over."""
    memory = bytearray(SLOT_BYTES)
    holdings = Holdings(list(map(PagePool, division.needed)), SlotPool(memoryview(memory)))
    first = holdings.take(ROOM, division.first).pages
    holdings.expose(ROOM, division.pages_for(division.known_tokens))
    holdings.commit(ROOM)
    lead = tuple(table[:count] for table, count in zip(first, division.shared, strict=True))
    tables = [first, *[lead] * (division.choices - 1)]
    assert division.begun == [division.positions(tuple(map(len, table))) for table in tables]
    for choice, table in enumerate(tables):
        lacking = tuple(each - len(has) for each, has in zip(division.each, table, strict=True))
        tables[choice] = tuple(map(add, table, holdings.grow(ROOM, lacking, choice)))
    assert not any(holdings.available)
    return tables


@given(divisions())
def test_choices_apart_nobody_writes_where_another_reads(division: ChoicePages) -> None:
    tables = grown(division)
    written = [_written(division, table, choice) for choice, table in enumerate(tables)]
    for one, other in combinations(range(division.choices), 2):
        assert not written[one] & of(tables[other])
        assert not written[other] & of(tables[one])
    assert len({place for table in tables for place in of(table)}) == sum(division.needed)


def _written(division: ChoicePages, tables: PageTables, choice: int) -> set[Place]:
    """Return the pages that this choice writes. For choice 0 the hand-over wrote the known tokens. Each other
    one computes from behind the shared pages on."""
    first = division.known_tokens if choice == 0 else division.shared_tokens
    return {
        (group, table[position // size])
        for group, (table, size) in enumerate(zip(tables, division.page_tokens, strict=True))
        for position in range(first, division.tokens_max)
    }


@given(divisions())
def test_each_choice_has_pages_for_all_its_tokens_and_computes_the_last_known_one(
    division: ChoicePages,
) -> None:
    first, *_ = all_tables = grown(division)
    for tables in all_tables:
        shapes = zip(tables, first, division.page_tokens, division.shared, strict=True)
        for table, others, size, shared in shapes:
            assert len(set(table)) == len(table) == -(-division.tokens_max // size)
            assert table[:shared] == others[:shared]
            assert shared * size == division.shared_tokens
    known, block = division.known_tokens, lcm(*division.page_tokens)
    assert division.shared_tokens < known <= division.shared_tokens + block


def test_one_choice_has_all_its_pages_to_itself() -> None:
    assert ChoicePages(9, 17, 1, (4,)).needed == (5,)
    assert ChoicePages(9, 17, 3, (4,)).needed == (5 + 2 * 3,)
    assert ChoicePages(9, 17, 3, (4, 8)).needed == (5 + 2 * 3, 3 + 2 * 2)
