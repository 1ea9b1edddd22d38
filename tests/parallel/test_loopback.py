"""Tests that the in-process rank group names the rank that broke it."""

import asyncio

import pytest

from baton.parallel.rank_group import GroupBroken
from tests.support.loopback import Loopback, LoopbackGroup


async def started(group: LoopbackGroup) -> asyncio.Task[list[int]]:
    """Start a rank that waits in an agreement."""
    task = asyncio.create_task(group.agree([group.rank]))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_lost_rank_is_named_to_those_who_wait_and_to_those_who_come() -> None:
    meeting = Loopback(3)
    first, second, _ = meeting.groups()
    waits = await started(first)
    meeting.lose(2, "died")
    with pytest.raises(GroupBroken, match="rank 2 died"):
        await waits
    with pytest.raises(GroupBroken, match="rank 2 died"):
        await second.agree([0])
    meeting.lose(1, "died later")
    with pytest.raises(GroupBroken, match="rank 2 died"):
        await second.broadcast(None)


async def test_a_rank_that_is_cancelled_while_it_waits_is_named() -> None:
    first, second, third = Loopback(3).groups()
    one, two = await started(first), await started(second)
    two.cancel()
    with pytest.raises(GroupBroken, match="rank 1 was cancelled"):
        await one
    with pytest.raises(GroupBroken, match="rank 1 was cancelled"):
        await third.agree([0])


async def test_a_rank_that_makes_another_call_is_named() -> None:
    first, second = Loopback(2).groups()
    waits = await started(first)
    with pytest.raises(GroupBroken, match="rank 1 called broadcast while others called agree"):
        await second.broadcast(None)
    with pytest.raises(GroupBroken, match="rank 1 called broadcast"):
        await waits


async def test_two_calls_at_a_time_of_one_rank_break_the_group() -> None:
    first, _ = Loopback(2).groups()
    waits = await started(first)
    with pytest.raises(GroupBroken, match=r"rank 0 .* twice"):
        await first.agree([0])
    with pytest.raises(GroupBroken, match=r"rank 0 .* twice"):
        await waits


async def test_ranks_resume_in_rank_order_whatever_order_they_came_in() -> None:
    groups = Loopback(3).groups()
    order: list[int] = []

    async def script(group: LoopbackGroup) -> None:
        await group.agree([0])
        order.append(group.rank)

    await asyncio.gather(*(script(group) for group in reversed(groups)))
    assert order == [0, 1, 2]


@pytest.mark.parametrize("size", [0, -1])
def test_a_group_has_a_rank(size: int) -> None:
    with pytest.raises(ValueError, match="group"):
        Loopback(size)
