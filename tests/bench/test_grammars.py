"""Test of `python -m bench grammars`: gaps of an event loop while grammars are compiled."""

from pathlib import Path

import pytest

from tests.bench.commands import bench

pytestmark = pytest.mark.bench


def test_gaps_while_grammars_are_compiled_are_set_beside_those_at_rest(demo_model_dir: Path) -> None:
    told = bench("grammars", "--runs", "3", "--model", str(demo_model_dir))
    assert (told["benchmark"], told["grammars"]) == ("grammars", 72)
    for kind in ("longest_gap_ms", "median_gap_ms"):
        assert set(told[kind]) == {"at rest", "worker", "bootstrap"}
    assert min(told["each_takes_ms"].values()) > 0
