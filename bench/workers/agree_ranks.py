"""Cost of one turn's agreement in a group of ranks, beside gloo's own all-reduce.

Each rank is a process with the event loop of production. Every round does each kind once, so that a
disturbance of the machine affects all kinds.

    all_reduce    bare gloo, MIN, of as many bytes as a ballot has, waited for by the calling thread
    agree         `RankGroup.agree` of a ballot
    broadcast     `RankGroup.broadcast` of no commands, until the leader has sent them
    turn          `take_turn` of a worker that holds nothing
    wake          the same after the leader has rested: from its waking to the end of the turn
"""

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from baton.parallel.rank_group import RankGroup
from baton.rooms.ballot import HEADER, Ballot
from baton.rooms.phases import Vote
from baton.runtime.clock import SystemClock
from baton.testing.idle_work import IdleWork
from baton.worker.turn_loop import TurnProgress, take_turn

HOST: Final = "127.0.0.1"
TIMEOUT_S: Final = 30.0
WARM_UP: Final = 20
REST_S: Final = 0.02
"""Pause after which every thread of the group sleeps, in seconds."""

Medians = dict[str, float]


def ballot_words(rooms: int) -> int:
    return HEADER + rooms


def measure_group(size: int, rooms: int, runs: int, patience_s: float) -> Medians | None:
    """Return the leader's median seconds of each kind. None if the ranks did not answer."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    ports = [_free_port(), _free_port()]
    ranks = [
        context.Process(target=_rank, args=(rank, size, ports, rooms, runs, theirs), daemon=True)
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(patience_s) else None
    except EOFError:
        return None
    finally:
        for rank in ranks:
            rank.join(1.0)
            rank.kill()


def _rank(rank: int, size: int, ports: Sequence[int], rooms: int, runs: int, answer: Connection) -> None:
    import torch
    import uvloop

    torch.set_num_threads(1)
    seconds = uvloop.run(_measure(rank, size, ports, rooms, runs))
    if rank == 0:
        answer.send({key: statistics.median(values[WARM_UP:]) for key, values in seconds.items()})


async def _measure(
    rank: int, size: int, ports: Sequence[int], rooms: int, runs: int
) -> dict[str, list[float]]:
    group = await _group(rank, size, ports[0])
    all_reduce = _bare(rank, size, ports[1], ballot_words(rooms))
    work, clock = IdleWork(rooms), SystemClock()
    progress = TurnProgress(clock)
    ballot = Ballot(0, 0, True, False, [Vote.STAY] * rooms).encode()
    seconds: dict[str, list[float]] = {
        key: [] for key in ("all_reduce", "agree", "broadcast", "turn", "wake")
    }

    def note(key: str, started: float) -> None:
        seconds[key].append(time.perf_counter() - started)

    for _ in range(WARM_UP + runs):
        started = time.perf_counter()
        all_reduce()
        note("all_reduce", started)
        started = time.perf_counter()
        await group.agree(ballot)
        note("agree", started)
        started = time.perf_counter()
        await group.broadcast(b"" if rank == 0 else None)
        note("broadcast", started)
        await group.agree(ballot)  # for the leader a broadcast is over before the others have it
        started = time.perf_counter()
        await take_turn(work, group, clock, progress)
        note("turn", started)
        if rank == 0:
            await asyncio.sleep(REST_S)
        started = time.perf_counter()
        await take_turn(work, group, clock, progress)
        note("wake", started)
    all_reduce()  # nobody leaves before all have measured
    await group.close()
    return seconds


async def _group(rank: int, size: int, port: int) -> RankGroup:
    """Return a group, made as a worker makes it."""
    from baton.parallel.gloo import GlooGroup
    from baton.parallel.solo import SoloGroup

    return SoloGroup() if size == 1 else await GlooGroup.join(rank, size, HOST, port, TIMEOUT_S)


def _bare(rank: int, size: int, port: int, words: int) -> Callable[[], None]:
    """Return gloo's all-reduce without the product's code."""
    import torch
    import torch.distributed

    from baton.parallel.rendezvous import Rendezvous, gloo_connections, open_store

    c10d: Any = torch.distributed
    at = Rendezvous(HOST, port)
    connections = gloo_connections(rank, size, at, TIMEOUT_S, open_store(rank, size, at, TIMEOUT_S))
    options = c10d.AllreduceOptions()
    options.reduceOp = c10d.ReduceOp.MIN
    tensor = torch.ones(words, dtype=torch.int64)

    def all_reduce() -> None:
        connections.allreduce([tensor], options).wait()

    return all_reduce


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port
