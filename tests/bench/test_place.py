"""Test of `python -m bench place`: many workers and rooms beside few."""

import pytest

from tests.bench.commands import bench

pytestmark = pytest.mark.bench


def test_many_workers_and_rooms_are_set_beside_few() -> None:
    body = bench("place", "--json", "--runs", "5", "--workers", "40", "--few", "4", "--rooms", "300")
    assert (body["workers"], body["rooms"]) == ([4, 40], [5, 300])
    for name in ("place", "place_with_rooms", "look_with_rooms"):
        assert set(body[name]["median_ms"]) == {"few", "many"}
        assert body[name]["ratio"] > 0
    assert body["ratio"] == body["place"]["ratio"]
    assert min(body["register_s"]) > 0
