"""Test of `python -m bench router`: the bootstrap before workers that answer at once."""

from pathlib import Path

import pytest

from tests.bench.commands import bench

pytestmark = pytest.mark.bench

WHAT = {"per_s", "per_cpu_s", "core_share", "latency_ms"}


def test_requests_and_tokens_a_second_and_the_added_latency_are_told(demo_model_dir: Path) -> None:
    sizes = ["--runs", "3", "--requests", "64", "--streams", "64", "--tokens", "4", "--routers", "2"]
    body = bench("router", "--json", "--model", str(demo_model_dir), *sizes)
    assert body["benchmark"] == "router"
    assert body["routers"] == 2
    for kind in ("requests", "tokens", "tokens_by_8"):
        assert set(body[kind]) == {"1", "16", "64"}
        for row in body[kind].values():
            assert set(row) == WHAT
            assert min(row.values()) > 0
    assert body["direct_latency_ms"] > 0
    assert body["ratio"] > 0
    assert set(body) >= {"added_latency_ms", "runs", "cores"}
