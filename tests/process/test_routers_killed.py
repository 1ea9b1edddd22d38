"""Tests of three bootstraps over one pair of workers: each is killed, and stopped, under streams."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.process.router_faults import NAMES, SWEPT, Routers, disturb, kill_behind, running_routers

TENTHS: Final = (0, 5, 10)
"""Tenths of their events behind which streams are cut. `tests.process.router_faults` cuts behind each."""


@pytest.fixture(scope="module")
def routers(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    with running_routers(demo_model_dir, tmp_path_factory.mktemp("stack")) as running:
        yield running


def test_stream_is_prefix_each_bootstrap_is_killed_under_32_streams(routers: Routers) -> None:
    disturb(routers, "SIGKILL")


def test_drain_keeps_promises_bootstraps_that_are_stopped_in_turn_break_none_of_32_streams(
    routers: Routers,
) -> None:
    disturb(routers, "SIGTERM")


def test_stream_is_prefix_streams_go_on_wherever_the_kill_cut_them(routers: Routers) -> None:
    start = routers.stack.idle_gauges()
    for killed, tenths in zip(range(len(NAMES)), TENTHS, strict=True):
        kill_behind(routers, killed, {kind: 1 + (routers.events(kind) - 2) * tenths // 10 for kind in SWEPT})
    routers.stack.wait_idle(start)
