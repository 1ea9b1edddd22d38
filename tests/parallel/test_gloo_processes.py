"""Tests of rank groups of real processes over gloo, also when one of them dies, hangs or never comes."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from baton.parallel.gloo import GlooGroup
from baton.parallel.gloo_exchange import whole_wait
from baton.parallel.rank_group import GroupBroken, RankGroup
from tests.forks import ForkedProcess, fork_call
from tests.parallel import rank_process
from tests.parallel.groups import gloo_groups, play
from tests.ports import free_port

PATIENCE_S = 60
TURNS = ["turn 0 0 0 -1", "turn 1 1 0 -1", "turn 2 2 0 -1"]
TURNS_OF_THREE = ["turn 0 0 0 -2", "turn 1 1 0 -2", "turn 2 2 0 -2"]


@dataclass
class Rank:
    process: ForkedProcess
    said: Path


class Ranks:
    def __init__(self, directory: Path) -> None:
        self.started: list[Rank] = []
        self._directory = directory

    def start(self, behaviours: list[str], timeout_s: float) -> list[Rank]:
        port = free_port()
        for rank, behaviour in enumerate(behaviours):
            said = self._directory / f"rank-{rank}"
            arguments = (said, rank, len(behaviours), port, timeout_s, behaviour)
            self.started.append(Rank(fork_call(rank_process.run, arguments), said))
        return self.started


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    for rank in ranks.started:
        rank.process.kill()
        rank.process.wait()


async def test_the_leader_waits_for_what_it_sent_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader learns from the agreement whether commands and the verdict before them have arrived."""
    waits: list[int] = []
    end = GlooGroup._end

    async def noted(group: GlooGroup) -> None:
        waits.append(group.rank)
        await end(group)

    monkeypatch.setattr(GlooGroup, "_end", noted)

    async def turns(group: RankGroup) -> int:
        await group.agree([0])  # which fixes the length, too
        before = waits.count(0)
        for turn in range(5):
            await group.broadcast(bytes([turn]) if group.rank == 0 else None)
            assert await group.agree([turn + group.rank]) == [turn]
        return waits.count(0) - before

    groups = await gloo_groups(2)
    assert (await play(groups, turns))[0] == 5
    for group in groups:
        await group.close()


async def test_a_broadcast_behind_one_that_no_agreement_followed_is_heard_behind_it() -> None:
    async def twice(group: RankGroup) -> list[bytes]:
        said = [b"one" * 1000, b"two", b"three" * 1000]
        return [await group.broadcast(each if group.rank == 0 else None) for each in said]

    groups = await gloo_groups(3)
    assert await play(groups, twice) == [[b"one" * 1000, b"two", b"three" * 1000]] * 3
    for group in groups:
        await group.close()


def test_gloo_never_waits_less_than_it_was_asked_to() -> None:
    """Gloo rounds a timeout down to whole milliseconds. A rank would see the early end as no timeout yet."""
    for left_s in (-1.0, 0.0, 1e-9, 0.0101, 0.9999, 3.9997, 4.0):
        wait = whole_wait(left_s)
        assert wait > timedelta(0)
        assert left_s <= wait.total_seconds() <= max(left_s, 0) + 0.001
        assert wait % timedelta(milliseconds=1) == timedelta(0)


def lines(rank: Rank) -> list[str]:
    """Return all lines that the rank wrote, after its process has ended by itself."""
    assert rank.process.wait(PATIENCE_S) == 0
    return rank.said.read_text().splitlines()


def test_two_processes_take_the_same_turns(ranks: Ranks) -> None:
    first, second = ranks.start(["end", "end"], timeout_s=30)
    assert lines(first) == TURNS
    assert lines(second) == TURNS


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_every_rank_learns_at_once_which_one_died(ranks: Ranks, victim: int) -> None:
    """The ranks learn it long before the timeout, which is longer than this test waits."""
    behaviours = ["on", "on", "on"]
    behaviours[victim] = "die"
    processes = ranks.start(behaviours, timeout_s=2 * PATIENCE_S)
    for rank in {0, 1, 2} - {victim}:
        *turns, last = lines(processes[rank])
        assert turns == TURNS_OF_THREE
        assert re.fullmatch(rf"broken: turn [34]: rank {victim} has gone \(connection closed\)", last)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_every_rank_learns_after_the_time_out_which_one_hangs(ranks: Ranks, victim: int) -> None:
    behaviours = ["on", "on", "on"]
    behaviours[victim] = "freeze"
    processes = ranks.start(behaviours, timeout_s=4)
    for rank in {0, 1, 2} - {victim}:
        *turns, last = lines(processes[rank])
        assert turns == TURNS_OF_THREE
        assert last == f"broken: turn 4: rank {victim} did not answer within 4 s"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_lives_and_does_not_come_is_named(ranks: Ranks, victim: int) -> None:
    behaviours = ["on", "on", "on"]
    behaviours[victim] = "stray"
    processes = ranks.start(behaviours, timeout_s=3)
    for rank in {0, 1, 2} - {victim}:
        *turns, last = lines(processes[rank])
        assert turns == TURNS_OF_THREE
        assert re.fullmatch(
            rf"broken: turn [34]: rank {victim} did not come to the agreement within 3 s", last
        )


def test_a_follower_that_waits_for_an_idle_leader_learns_that_another_died(ranks: Ranks) -> None:
    _, waits, _ = ranks.start(["rest", "wait", "die"], timeout_s=2 * PATIENCE_S)
    *turns, last = lines(waits)
    assert turns == TURNS_OF_THREE
    assert last == "broken: turn 3: rank 2 has gone (connection closed)"


def test_idle_ranks_do_not_compute(ranks: Ranks) -> None:
    """A rank that spins would use up the three seconds of waiting as processor time."""
    for process in ranks.start(["idle", "idle", "idle"], timeout_s=30):
        *turns, last = lines(process)
        assert turns == TURNS_OF_THREE
        word, used_s = last.split()
        assert word == "idle"
        assert float(used_s) < 0.5


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
    with pytest.raises(GroupBroken, match="turn 1: rank 0 was cancelled"):
        await second.agree([0])
    await first.close()
    await second.close()
