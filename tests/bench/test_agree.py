"""Test of `python -m bench agree`: the product's agreement beside gloo's own, for each size of group."""

import pytest

from baton.rooms.ballot import HEADER
from tests.bench.commands import bench

pytestmark = pytest.mark.bench

ROOMS = 40


def test_the_agreement_of_one_two_and_three_ranks_is_set_beside_an_all_reduce_of_the_same_bytes() -> None:
    body = bench("agree", "--json", "--runs", "5", "--rooms", str(ROOMS))
    assert body["bytes"] == 8 * (HEADER + ROOMS)
    assert [group["ranks"] for group in body["groups"]] == [1, 2, 3]
    for group in body["groups"]:
        medians = group["median_ms"]
        assert min(medians.values()) >= 0
        assert set(medians) == {"all_reduce", "agree", "broadcast", "turn", "wake"}
        assert group["ratio"] > 0
        assert group["wake_ms"] == medians["wake"] > 0
    assert body["ratio"] == max(group["ratio"] for group in body["groups"])
