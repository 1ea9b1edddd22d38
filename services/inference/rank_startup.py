"""Start of a worker's ranks: they connect with each other before each loads its part of the model."""

from collections.abc import Callable
from typing import Final, TypeVar

from baton.engine_interface import RankGroupBroken
from baton.inference.collectives import Collectives
from baton.inference.device import find_device
from baton.inference.process_group import join_rank_group
from baton.runtime.errors import GroupLost
from baton.runtime.setting_kinds import split_address
from baton.runtime.worker_settings import WorkerSettings
from baton.topology import Topology

STEP_TIMEOUTS: Final = 10
"""Factor by which a rank waits longer for other ranks within a step than the group's timeout.

Large steps on slow cores take long. The ranks' agreement on votes notices a dead rank sooner.
"""

StartedEngine = TypeVar("StartedEngine")


def start_with_ranks(
    settings: WorkerSettings, start: Callable[[Topology, int, Collectives | None], StartedEngine]
) -> StartedEngine:
    """Connect to the other ranks of the worker in `settings`, then call `start` and return its result.
    Blocks.

    `start`: starts the engine of a rank, given the topology, the rank and its group. The group is None for a
    worker of one rank. Raises GroupLost if another rank does not come up, and any error of `start`.
    """
    topology, rank = settings.topology, settings.rank or 0
    try:
        rank_group = None
        if settings.grouped:
            host, port = split_address(settings.rendezvous)
            rank_group = start_rank_group(
                settings, topology, rank, host, port, settings.group_timeout_ms / 1000
            )
        return start(topology, rank, rank_group)
    except RankGroupBroken as error:
        raise GroupLost(str(error)) from error


def start_rank_group(
    settings: WorkerSettings, topology: Topology, rank: int, host: str, port: int, timeout_s: float
) -> Collectives | None:
    """Connect to the other ranks of this worker through the store at `host:port`. Blocks.

    Returns the collectives between the ranks, or None if there is only one rank. Raises RankGroupBroken, or
    StartupError for a device that does not exist.
    """
    if topology.ranks == 1:
        return None
    device = find_device(settings.device, rank)
    return join_rank_group(topology, rank, host, port, timeout_s, device, STEP_TIMEOUTS * timeout_s)
