"""Test of `python -m bench turn`: turns of both sides, with rooms in the named phases."""

import pytest

from tests.bench.commands import bench

pytestmark = pytest.mark.bench

ROOMS = 20
BURST = 30


def test_turns_of_both_sides_are_set_beside_a_pass_over_the_rooms() -> None:
    body = bench("turn", "--json", "--runs", "3", "--rooms", str(ROOMS), "--burst", str(BURST))
    held = {(each["side"], each["mix"]): each["rooms"] for each in body["workers"]}
    assert held == {
        ("decode", "mixed"): {"waiting_for_input": 16, "transferring": 2, "success": 2},
        ("decode", "running"): {"success": ROOMS},
        ("prefill", "mixed"): {"bootstrapping": 8, "waiting_for_input": 8, "transferring": 4},
        ("prefill", "running"): {"transferring": ROOMS},
    }
    for each in body["workers"]:
        assert set(each["median_ms"]) == {"beside", "ended", "pass"}
        assert min(each["median_ms"].values()) > 0
    assert body["ratio"] == max(each["ratio"] for each in body["workers"])
    assert [(each["side"], each["commands"]) for each in body["bursts"]] == [
        ("decode", BURST),
        ("prefill", BURST),
    ]
    for each in body["bursts"]:
        assert each["turns"] > 1
        assert each["longest_ms"] < each["all_ms"]
