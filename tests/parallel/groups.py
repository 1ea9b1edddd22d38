"""Helpers that drive a whole rank group in one test, whichever backend it has."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from baton.parallel.gloo import GlooGroup
from baton.parallel.rank_group import RankGroup
from baton.parallel.solo import SoloGroup
from tests.ports import free_port
from tests.support.loopback import Loopback

GROUP_TIMEOUT_S = 20.0

MakeGroups = Callable[[int], Awaitable[list[RankGroup]]]


class Script(Protocol):
    """An async function that one rank runs with its group."""

    async def __call__(self, group: RankGroup) -> object: ...


async def solo_groups(size: int) -> list[RankGroup]:
    assert size == 1
    return [SoloGroup()]


async def loopback_groups(size: int) -> list[RankGroup]:
    return list(Loopback(size).groups())


async def gloo_groups(size: int) -> list[RankGroup]:
    """Return the groups of all ranks in this process, each with its own sockets and thread."""
    port = free_port()
    joins = (GlooGroup.join(rank, size, "127.0.0.1", port, GROUP_TIMEOUT_S) for rank in range(size))
    return list(await asyncio.gather(*joins))


async def play(groups: list[RankGroup], script: Script) -> list[object]:
    """Run the script on every rank, and return the outcomes by rank. An exception is an outcome, too."""
    return await asyncio.gather(*(script(group) for group in groups), return_exceptions=True)


BACKENDS: dict[str, tuple[MakeGroups, int]] = {
    "solo-1": (solo_groups, 1),
    "loopback-1": (loopback_groups, 1),
    "loopback-2": (loopback_groups, 2),
    "loopback-3": (loopback_groups, 3),
    "gloo-1": (gloo_groups, 1),
    "gloo-2": (gloo_groups, 2),
    "gloo-3": (gloo_groups, 3),
}
