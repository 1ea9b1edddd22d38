"""Tests that all ranks are told which rank left the group, at whatever moment it leaves.

All ranks are in one process, so that many moments can be tried. `test_gloo_processes` has ranks that die."""

import asyncio
import random

import pytest

from baton.parallel.rank_group import GroupBroken, RankGroup
from tests.parallel.groups import gloo_groups

PATIENCE_S = 60


async def turns_without_end(group: RankGroup, rng: random.Random) -> str:
    """Take turns until the group breaks, and return the text of its error."""
    try:
        while True:
            commands = bytes(rng.choice([0, 10, 5000]))
            await group.broadcast(commands if group.rank == 0 else None)
            assert await group.agree([group.rank, -group.rank]) == [0, 1 - group.size]
            await group.gather(bytes(rng.choice([1, 3000])))
    except GroupBroken as error:
        return str(error)


@pytest.mark.parametrize("seed", range(16), ids="seed{:02}".format)
async def test_every_rank_is_told_which_one_left_and_how_whenever_it_does(seed: int) -> None:
    rng = random.Random(seed)
    groups = await gloo_groups(rng.choice([2, 3, 4]))
    leaver = rng.choice(groups)
    tasks = [asyncio.create_task(turns_without_end(group, rng)) for group in groups]
    await asyncio.sleep(rng.random() * 0.05)
    if cancelled := rng.random() < 0.5:
        tasks[leaver.rank].cancel()
    else:
        await leaver.close()
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    why = "was cancelled while it waited" if cancelled else "has left the group"
    for group, end in zip(groups, ends, strict=True):
        if cancelled and group is leaver:
            assert isinstance(end, asyncio.CancelledError)
        else:
            assert isinstance(end, str)
            assert f"rank {leaver.rank} {why}" in end
    for group in groups:
        await group.close()
