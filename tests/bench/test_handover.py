"""Tests of the benchmarks of transfer, hand-over and rooms."""

from typing import Any

import pytest

from bench.rooms.room_times import SENT, STAGES, times_of
from tests.bench.commands import BENCH_S, bench

pytestmark = pytest.mark.bench


def test_pages_are_set_beside_bare_writes_of_as_many_bytes() -> None:
    body = bench("transfer", "--runs", "3", "--chunk", "1", "--json")
    shapes = {(tuple(each["page_tokens"]), tuple(each["tensor"]), each["pages"]) for each in body["cases"]}
    assert len(shapes) == len(body["cases"]) == 9
    for each in body["cases"]:
        assert each["bytes"] >= 2**20
        assert {"push", "memcpy", "nixl whole"} <= set(each["gigabytes_s"])
        assert each["ratio"] > 0
    assert body["ratio"] == min(each["ratio"] for each in body["cases"] if each["same_shape"])


def test_rooms_are_set_beside_bare_calls() -> None:
    body = bench("rooms", "--runs", "1", "--count", "20", "--concurrency", "4", "--json")
    assert body["rooms_s"] > 0
    assert body["calls_s"] > 0
    assert set(body["cpu_ms_a_room"]) == {"registry", "prefill", "decode"}
    assert min(body["turns_a_room"].values()) > 0


@pytest.mark.timeout(BENCH_S + 20)
def test_every_stage_of_a_request_has_its_time() -> None:
    lengths = ("--prompt-tokens", "150", "--output-tokens", "3", "--flags", "--chunk-tokens 64")
    body = bench("handover", "--runs", "3", *lengths, "--json")
    assert set(body["stages_ms"]) == set(STAGES)
    assert body["chunks"] == 3
    assert body["bytes"] > 0
    assert body["handover_ms"] > body["compute_ms"] > 0
    assert body["transfer_ms"] > 0
    assert 0 < body["hidden"] <= 1, "two chunks of three are written while the next is computed"


def test_a_timeline_is_read_by_who_saw_what_first() -> None:
    def event(source: str, name: str, at: int, detail: str = "") -> dict[str, Any]:
        return {"source": source, "name": name, "host_us": at, "detail": detail}

    room = {
        "prefill": "p",
        "decode": "d",
        "events": [
            event("bootstrap", "opened", 5),
            event("p", "chunk computed", 20),
            event("p", "chunk computed", 30),
            event("p", "sealed", 50, "3 pages, generation 1, 640 bytes in 9 us, 4 us of them beside steps"),
            event("d", "admitted", 60),
        ],
    }
    times = times_of({SENT: 1}, room)
    assert (times.chunks, times.length, times.transfer_us, times.hidden_us) == (3, 640, 9, 4)
    assert times.at_us["prefill", "chunk computed"] == 20
    assert times.handover_us == 55
