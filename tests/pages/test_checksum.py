"""Tests of the numbers in a page checksum: changes in two places cannot cancel out."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.pages.kv_checksum import WORD, KvChecksum, key, lane, mix, multiplier, nonzero_sum, word_bytes

WORDS_MAX = 256
"""Most words in one vector: 512 numbers of two bytes each."""
U64 = st.integers(0, WORD)


@given(U64, U64)
def test_the_mix_gives_differing_values_for_differing_values(one: int, other: int) -> None:
    assert (mix(one) == mix(other)) == (one == other)
    assert 0 <= mix(one) <= WORD


def test_the_mix_is_the_finaliser_of_splitmix64() -> None:
    """The published generator's first outputs from seed 1234567."""
    gamma = 0x9E3779B97F4A7C15
    drawn = [mix(1234567 + turn * gamma) for turn in range(1, 4)]
    assert drawn == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_no_bit_of_a_word_is_lost_and_no_two_words_count_alike() -> None:
    multipliers = [multiplier(index) for index in range(WORDS_MAX)]
    assert all(each % 2 for each in multipliers)
    assert len(set(multipliers)) == WORDS_MAX


def test_the_same_bit_flipped_in_two_words_never_cancels_not_even_the_topmost() -> None:
    """Two flipped signs: a difference of 2**31 * (m ± n), which is nothing if 2**33 divides m ± n."""
    for one, other in combinations(map(multiplier, range(WORDS_MAX)), 2):
        assert (one + other) % 2**33
        assert (one - other) % 2**33


def test_every_place_has_a_key_of_its_own() -> None:
    places = product(range(9), (0, 1), range(9), range(40))
    keys = [key(lane(layer, half, head), position) for layer, half, head, position in places]
    assert len(set(keys)) == len(keys)
    assert 0 not in keys, "a vector of zeros counts"


@pytest.mark.parametrize(("vector", "word"), [(256, 4), (128, 4), (8, 4), (4, 4), (2, 2), (6, 2)])
def test_words_divide_the_vector_and_are_narrower_than_the_sum(vector: int, word: int) -> None:
    assert word_bytes(vector) == word


@given(st.integers())
def test_a_computed_sum_is_never_the_number_for_none(total: int) -> None:
    assert 1 <= nonzero_sum(total) <= WORD


def test_the_modes_are_a_closed_set() -> None:
    assert [each.value for each in KvChecksum] == ["off", "record", "pages"]
