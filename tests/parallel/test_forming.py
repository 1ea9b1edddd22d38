"""Tests of forming a rank group: ranks with other settings, and ranks that cannot start, end all with a named
cause."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from baton.decode.settings import DecodeSettings
from baton.parallel.gloo import GlooGroup
from baton.parallel.rank_group import GroupBroken, RankGroup
from baton.runtime.errors import GroupLost, StartupError
from baton.runtime.settings import load, settings_of
from baton.worker.lifecycle.startup import (
    OWN,
    StartedDifferently,
    agree_on,
    explained,
    form_group,
    load_together,
)
from tests.parallel.groups import gloo_groups
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.support.loopback import Loopback


def settings(rank: int, port: int, **flags: str) -> DecodeSettings:
    given = {"tp": "2", "rank": str(rank), "rendezvous": f"127.0.0.1:{port}", **flags}
    return load(DecodeSettings, given, {})


async def all_end(*ranks: Any) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.gather(*ranks, return_exceptions=True)


async def test_ranks_that_were_started_alike_learn_the_leaders_number() -> None:
    port = free_port()
    first, second = await all_end(
        form_group(settings(0, port), GlooGroup.join, 70), form_group(settings(1, port), GlooGroup.join, 71)
    )
    assert (first.group.rank, first.leaders) == (0, 70)
    assert (second.group.rank, second.leaders) == (1, 70)
    await all_end(first.group.close(), second.group.close())


async def test_a_worker_of_one_rank_meets_nobody() -> None:
    formed = await form_group(load(DecodeSettings, {}, {}), GlooGroup.join, 70)
    assert (formed.group.size, formed.leaders) == (1, 70)


async def test_ranks_started_differently_all_end_naming_the_flag_and_the_rank() -> None:
    port = free_port()
    ends = await all_end(
        form_group(settings(0, port), GlooGroup.join, 1),
        form_group(settings(1, port, max_rooms="8"), GlooGroup.join, 2),
    )
    for end in ends:
        assert isinstance(end, StartedDifferently)
        assert str(end).startswith("rank 1 was started with --max-rooms 8, rank 0 was started with 256:")


def test_what_may_differ_from_rank_to_rank_is_said_and_nothing_else() -> None:
    names = {each.name for each in settings_of(DecodeSettings)}
    assert names >= OWN
    assert names - OWN >= {"tp", "dtype", "page_tokens", "max_rooms", "kv_checksum", "max_running"}


async def loaded(after_s: float, outcome: object) -> object:
    await asyncio.sleep(after_s)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def together(groups: Sequence[RankGroup], *outcomes: tuple[float, object]) -> list[Any]:
    return await all_end(
        *(load_together(group, loaded(*each)) for group, each in zip(groups, outcomes, strict=True))
    )


async def test_every_rank_waits_until_all_have_loaded() -> None:
    groups = Loopback(3).groups()
    assert await together(groups, (0.0, "a"), (0.6, "b"), (0.1, "c")) == ["a", "b", "c"]


async def test_a_rank_that_cannot_start_says_so_itself_and_the_others_say_that_it_was_that_rank() -> None:
    memory = StartupError("too little memory")
    first, second, third = await together(Loopback(3).groups(), (0.0, "a"), (0.1, memory), (30.0, "c"))
    assert second is memory
    for lost in (first, third):
        assert isinstance(lost, GroupLost)
        assert str(lost) == "rank 1: too little memory"


async def test_a_rank_that_ends_while_another_loads_is_known_at_once() -> None:
    groups = await gloo_groups(2)
    waiting = asyncio.create_task(load_together(groups[0], loaded(600.0, None)))
    await asyncio.sleep(0.3)
    await groups[1].close()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(GroupLost, match="rank 1"):
            await waiting


async def test_a_difference_that_loading_shows_ends_every_rank() -> None:
    groups = Loopback(2).groups()
    ends = await all_end(agree_on(groups[0], {"model": "a"}), agree_on(groups[1], {"model": "b"}))
    for end in ends:
        assert isinstance(end, StartedDifferently)
        assert str(end).startswith("rank 1 has model b, rank 0 has a:")


class Vague(Exception):
    """Error of a step that broke for an unknown reason."""


async def vague() -> None:
    raise Vague("connection closed by peer")


async def test_a_step_that_broke_names_the_rank_when_the_group_knows_it() -> None:
    groups = await gloo_groups(2)
    await groups[1].close()
    with pytest.raises(GroupBroken, match=r"rank 1 .*; connection closed by peer$"):
        await explained(vague(), groups[0], Vague)


async def test_a_step_that_broke_while_the_group_is_whole_is_told_as_it_is() -> None:
    groups = await gloo_groups(2)
    with pytest.raises(Vague, match=r"^connection closed by peer$"):
        await explained(vague(), groups[0], Vague)
    await all_end(*(group.close() for group in groups))
