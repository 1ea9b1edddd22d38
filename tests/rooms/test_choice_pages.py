"""Do a room's choices share what they all read, and nothing that one of them writes?"""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from services.rooms.choice_pages import ChoicePages
from tests.pages.ids import page_ids


@st.composite
def divisions(draw: st.DrawFn) -> ChoicePages:
    known = draw(st.integers(1, 40))
    return ChoicePages(
        known, known + draw(st.integers(0, 40)), draw(st.integers(1, 6)), draw(st.integers(1, 9))
    )


@given(divisions())
def test_choices_apart_nobody_writes_where_another_reads(division: ChoicePages) -> None:
    pages = page_ids(*range(100, 100 + division.needed))
    tables = [division.table(pages, choice) for choice in range(division.choices)]
    written = [_written(division, table, choice) for choice, table in enumerate(tables)]
    for one, other in combinations(range(division.choices), 2):
        assert not written[one] & set(tables[other])
        assert not written[other] & set(tables[one])
    assert {page for table in tables for page in table} == set(pages), "and none is for nobody"


def _written(division: ChoicePages, table: tuple[int, ...], choice: int) -> set[int]:
    """Of choice 0 the hand-over wrote what is known; each other computes from behind the shared pages on."""
    first = division.known_tokens if choice == 0 else division.shared_tokens
    return {table[position // division.page_tokens] for position in range(first, division.tokens_max)}


@given(divisions())
def test_each_choice_has_pages_for_all_its_tokens_and_computes_the_last_known_one(
    division: ChoicePages,
) -> None:
    pages = page_ids(*range(division.needed))
    for choice in range(division.choices):
        table = division.table(pages, choice)
        assert len(set(table)) == len(table) == -(-division.tokens_max // division.page_tokens)
        assert table[: division.shared] == pages[: division.shared]
    assert division.shared_tokens < division.known_tokens <= division.shared_tokens + division.page_tokens


def test_one_choice_has_all_its_pages_to_itself() -> None:
    assert ChoicePages(9, 17, 1, 4).needed == 5
    assert ChoicePages(9, 17, 3, 4).needed == 5 + 2 * 3
