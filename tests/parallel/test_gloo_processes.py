"""Do real processes agree over gloo, and does each learn it when another dies, hangs or never comes?"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.parallel.gloo import GlooGroup
from services.parallel.interface import GroupBroken
from tests.parallel.groups import free_port, gloo_groups

PATIENCE_S = 60
TURNS = ["turn 0 0 0 -1", "turn 1 1 0 -1", "turn 2 2 0 -1"]

Rank = subprocess.Popen[str]


class Ranks:
    def __init__(self) -> None:
        self.started: list[Rank] = []

    def start(self, behaviours: list[str], timeout_s: float) -> list[Rank]:
        port = free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank, behaviour in enumerate(behaviours):
            numbers = [str(rank), str(len(behaviours)), str(port), str(timeout_s)]
            command = [sys.executable, "-m", "tests.parallel.rank_process", *numbers, behaviour]
            self.started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return self.started


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    for process in ranks.started:
        process.kill()
        process.communicate()


def lines(process: Rank) -> list[str]:
    return process.communicate(timeout=PATIENCE_S)[0].splitlines()


def test_two_processes_take_the_same_turns(ranks: Ranks) -> None:
    first, second = ranks.start(["end", "end"], timeout_s=30)
    assert lines(first) == TURNS
    assert lines(second) == TURNS
    assert (first.returncode, second.returncode) == (0, 0)


def test_a_rank_that_dies_breaks_the_group_at_the_turn(ranks: Ranks) -> None:
    survivor, _ = ranks.start(["on", "die"], timeout_s=PATIENCE_S)
    *turns, last = lines(survivor)
    assert turns == TURNS
    assert last.startswith("broken: turn 4: rank 0 waited for its group")
    assert survivor.returncode == 0


def test_a_rank_that_hangs_breaks_the_group_after_its_time_out(ranks: Ranks) -> None:
    survivor, _ = ranks.start(["on", "freeze"], timeout_s=5)
    *turns, last = lines(survivor)
    assert turns == TURNS
    assert last.startswith("broken: turn 4: rank 0 waited for its group, at most 5 s")


async def test_a_group_that_is_not_complete_is_not_joined() -> None:
    port = free_port()
    with pytest.raises(GroupBroken, match="rank 0 of 2 has not met its group"):
        await GlooGroup.join(0, 2, "127.0.0.1", port, timeout_s=1)
    with pytest.raises(GroupBroken, match="rank 1 of 2 has not met its group"):
        await GlooGroup.join(1, 2, "127.0.0.1", port, timeout_s=1)


async def test_a_busy_port_is_named() -> None:
    (group,) = await gloo_groups(1)
    port = free_port()
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    async with taken:
        with pytest.raises(GroupBroken, match=f"127.0.0.1:{port}.*in use"):
            await GlooGroup.join(0, 1, "127.0.0.1", port, timeout_s=5)
    await group.close()


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
async def test_a_rank_that_cannot_be_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        await GlooGroup.join(rank, size, "127.0.0.1", 1, timeout_s=1)


async def test_the_event_loop_goes_on_while_a_rank_waits() -> None:
    first, second = await gloo_groups(2)
    waits = asyncio.create_task(first.agree([1]))
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert not waits.done()
    assert await second.agree([0]) == [0]
    assert await waits == [0]
    await first.close()
    await second.close()


async def test_a_cancelled_wait_breaks_the_group_for_all_ranks() -> None:
    first, second = await gloo_groups(2)
    waits = asyncio.create_task(first.agree([1]))
    await asyncio.sleep(0.01)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    with pytest.raises(GroupBroken, match="turn 1: rank 0 was cancelled"):
        await first.agree([1])
    # Because the connections went with it, not by a time-out.
    with pytest.raises(GroupBroken, match=r"rank 1 waited.*(closed|reset) by peer"):
        await second.agree([0])
    await first.close()
    await second.close()
