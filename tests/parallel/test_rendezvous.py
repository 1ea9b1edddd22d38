"""Tests of the rendezvous of a rank group: a rank that cannot join is told why."""

import asyncio
import contextlib

import pytest

from baton.parallel.failure_detector import ANSWER_S
from baton.parallel.gloo import GlooGroup
from baton.parallel.rank_group import GroupBroken
from baton.parallel.rendezvous import Rendezvous, open_store
from tests.parallel.groups import GROUP_TIMEOUT_S, gloo_groups
from tests.ports import free_port

HOST = "127.0.0.1"


async def refusal(rank: int, size: int, port: int, timeout_s: float) -> str:
    with pytest.raises(GroupBroken) as refused:
        await GlooGroup.join(rank, size, HOST, port, timeout_s)
    return str(refused.value)


async def close(*groups: GlooGroup) -> None:
    for group in groups:
        await group.close()


async def test_a_leader_names_those_who_did_not_come_and_tells_those_who_did() -> None:
    port = free_port()
    told = await asyncio.gather(refusal(0, 4, port, 2.0), refusal(2, 4, port, 2.0))
    for rank, text in zip((0, 2), told, strict=True):
        assert text == (
            f"rank {rank} of 4 has not met its group at {HOST}:{port}, waiting at most 2 s: "
            "ranks 1, 3 did not come within 2 s"
        )


async def test_a_follower_without_a_leader_gives_up() -> None:
    text = await refusal(1, 2, free_port(), 1.0)
    assert text.startswith("rank 1 of 2 has not met its group at")


async def test_a_busy_port_is_named() -> None:
    port = free_port()
    taken = await asyncio.start_server(lambda *_: None, HOST, port)
    async with taken:
        assert f"rank 0 cannot listen at {HOST}:{port}: Address already in use" in await refusal(
            0, 1, port, 5.0
        )


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
async def test_a_rank_that_cannot_be_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        await GlooGroup.join(rank, size, HOST, 1, timeout_s=1)


async def test_a_rank_of_a_group_of_another_size_is_told_both_and_the_group_meets_without_it() -> None:
    port = free_port()
    leader = asyncio.create_task(GlooGroup.join(0, 2, HOST, port, GROUP_TIMEOUT_S))
    text = await refusal(1, 3, port, 10.0)
    assert text.endswith("rank 1 was started for a group of 3, rank 0 for one of 2")
    await close(*await asyncio.gather(leader, GlooGroup.join(1, 2, HOST, port, GROUP_TIMEOUT_S)))


async def test_a_rank_that_comes_twice_is_refused_and_the_group_lives_on() -> None:
    port = free_port()
    joins = [asyncio.create_task(GlooGroup.join(rank, 3, HOST, port, GROUP_TIMEOUT_S)) for rank in (0, 1)]
    await asyncio.sleep(0.5)
    assert "rank 1 is here already, as another process" in await refusal(1, 3, port, 10.0)
    third = await GlooGroup.join(2, 3, HOST, port, GROUP_TIMEOUT_S)
    groups = [*await asyncio.gather(*joins), third]
    assert "the group is complete" in await refusal(1, 3, port, 10.0)
    assert await asyncio.gather(*(group.agree([group.rank]) for group in groups)) == [[0]] * 3
    await close(*groups)


async def test_a_follower_that_was_there_and_went_may_come_again() -> None:
    port = free_port()
    leader = asyncio.create_task(GlooGroup.join(0, 3, HOST, port, GROUP_TIMEOUT_S))
    went = asyncio.create_task(GlooGroup.join(1, 3, HOST, port, GROUP_TIMEOUT_S))
    await asyncio.sleep(0.5)
    went.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await went
    await asyncio.sleep(0.1)
    came = [GlooGroup.join(rank, 3, HOST, port, GROUP_TIMEOUT_S) for rank in (1, 2)]
    await close(*await asyncio.gather(leader, *came))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"hello you 1 2\n", b"\xff" * 100_000])
async def test_strangers_at_the_rendezvous_and_at_the_watch_disturb_nobody(sent: bytes) -> None:
    port = free_port()
    leader = asyncio.create_task(GlooGroup.join(0, 2, HOST, port, GROUP_TIMEOUT_S))
    store = await asyncio.to_thread(open_store, 1, 2, Rendezvous(HOST, port), GROUP_TIMEOUT_S)
    watched = await asyncio.to_thread(store.get, "baton/watch")
    strangers = [
        await asyncio.open_connection(HOST, each)
        for each in (port, int(watched.split()[0]))
        for _ in range(3)
    ]
    for _, writer in strangers:
        writer.write(sent)
    await asyncio.sleep(0.1)
    groups = await asyncio.gather(leader, GlooGroup.join(1, 2, HOST, port, GROUP_TIMEOUT_S))
    assert await asyncio.gather(*(group.agree([group.rank]) for group in groups)) == [[0]] * 2
    for _, writer in strangers:
        writer.close()
    assert await asyncio.gather(*(group.agree([group.rank]) for group in groups)) == [[0]] * 2
    await close(*groups)


@pytest.mark.parametrize("host", ["localhost", "::1"])
async def test_a_rendezvous_by_name_and_over_ipv6(host: str) -> None:
    port = free_port()
    groups = await asyncio.gather(*(GlooGroup.join(rank, 2, host, port, GROUP_TIMEOUT_S) for rank in (0, 1)))
    assert await asyncio.gather(*(group.agree([group.rank]) for group in groups)) == [[0]] * 2
    await close(*groups)


async def test_a_host_that_nobody_knows_is_named() -> None:
    with pytest.raises(GroupBroken, match=r"nowhere\.invalid:1"):
        await GlooGroup.join(0, 1, "nowhere.invalid", 1, timeout_s=2 * ANSWER_S)


async def test_a_new_group_meets_where_the_last_one_broke() -> None:
    groups = await gloo_groups(1)
    await groups[0].close()
    port = free_port()
    for _ in range(2):
        pair = await asyncio.gather(
            *(GlooGroup.join(rank, 2, HOST, port, GROUP_TIMEOUT_S) for rank in (0, 1))
        )
        await close(*pair)
