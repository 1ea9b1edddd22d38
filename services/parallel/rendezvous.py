"""Connection of all ranks of one worker at their start, and the errors if some do not come.

Rank 0 hosts a key-value store for the whole life of the group. It gives followers the address of the leader's
failure detector. When all followers have connected to the leader, every rank makes its gloo connections.
Blocking calls run on their own thread, which is abandoned if its caller gives up.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed

from baton.parallel.failure_detector import FailureDetector, FollowerDetector, LeaderDetector, Whereabouts
from baton.parallel.rank_group import GroupBroken
from baton.runtime.gloo_connections import connect_gloo, first_line

WATCH_KEY: Final = "baton/watch"
GLOO_PREFIX: Final = "baton/agreement"

Outcome = TypeVar("Outcome")

c10d: Any = torch.distributed
"""The module torch.distributed as an untyped value, because torch's stubs lack methods of its classes."""
ProcessGroup = Any
Store = Any


@dataclass(frozen=True, slots=True)
class Rendezvous:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def meet(
    rank: int, size: int, at: Rendezvous, timeout_s: float, meet_s: float, where: Whereabouts
) -> tuple[Store, FailureDetector, ProcessGroup]:
    """Connect this rank to the others, once all ranks have arrived.

    Return the store, this rank's failure detector and its gloo connections. `meet_s`: longest wait for the
    ranks, in seconds. `timeout_s`: bound for the gloo connections, in seconds. Raises GroupBroken.
    """
    watch: FailureDetector | None = None
    try:
        store = await aside(lambda: open_store(rank, size, at, meet_s))
        if rank == 0:
            watch = leader = LeaderDetector(where, size, timeout_s)
            store.set(WATCH_KEY, await leader.listen(at.host))
            await leader.meet(meet_s)
        else:
            watch = follower = FollowerDetector(where, rank, size, timeout_s)
            address = await aside(lambda: store.get(WATCH_KEY).decode())
            await follower.meet(at.host, address, meet_s)
        connecting = aside(
            lambda: gloo_connections(rank, size, at, timeout_s, c10d.PrefixStore(GLOO_PREFIX, store))
        )
        watch.on_over = lambda why: _stop(connecting, why)
        return store, watch, await connecting
    except (RuntimeError, OSError) as error:  # TimeoutError is an OSError
        why = f"rank {rank} of {size} has not met its group at {at}, waiting at most {meet_s:g} s"
        cause = watch.over if watch is not None and watch.over is not None else first_line(error)
        if watch is not None:
            watch.leave(f"rank {rank} gave up: {cause}")
        raise GroupBroken(f"{why}: {cause}") from error
    except asyncio.CancelledError:
        if watch is not None:
            watch.leave(f"rank {rank} was cancelled while it met its group")
        raise


def aside(work: Callable[[], Outcome]) -> "asyncio.Future[Outcome]":
    """Run `work` on a daemon thread, and return a future of its result or error.

    Neither this event loop nor the end of the process waits for that thread.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Outcome] = loop.create_future()

    def settle(outcome: list[Outcome], error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(outcome[0])
        else:
            done.set_exception(error)

    def run() -> None:
        outcome, problem = [], None
        try:
            outcome = [work()]
        except Exception as error:
            problem = error
        post(loop, settle, outcome, problem)

    threading.Thread(target=run, name="agreement", daemon=True).start()
    return done


def post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Schedule a call in the event loop from another thread. No effect if the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return


def _stop(waiting: "asyncio.Future[Outcome]", why: str) -> None:
    if not waiting.done():
        waiting.set_exception(ConnectionAbortedError(why))


def open_store(rank: int, size: int, at: Rendezvous, timeout_s: float) -> Store:
    """Open the key-value store that the ranks share. Rank 0 serves it as long as the returned object exists.

    It blocks for at most `timeout_s` seconds. Raises RuntimeError, OSError.
    """
    listening = _listen(at) if rank == 0 else None
    # The store would listen on every network address, so it gets a socket bound to one.
    return c10d.TCPStore(
        at.host,
        at.port,
        size,
        rank == 0,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _listen(at: Rendezvous) -> int:
    family, _, _, _, address = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family).detach()
    except OSError as error:
        raise OSError(f"rank 0 cannot listen at {at}: {error.strerror}") from error


def gloo_connections(rank: int, size: int, at: Rendezvous, timeout_s: float, store: Store) -> ProcessGroup:
    """Connect this rank to all others over gloo. Return torch's process group.

    It blocks for at most `timeout_s` seconds. Raises RuntimeError, OSError.
    """
    group: ProcessGroup = connect_gloo(
        c10d, store, rank, size, timedelta(seconds=timeout_s), at.host, at.port
    )
    group.barrier().wait()
    return group
