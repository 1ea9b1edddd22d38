"""How do the processes of one worker agree, over gloo?

The only module that uses torch.distributed for agreement. The group is its own, not torch's default one,
so that the engine's group and its time-out stay apart. Collectives block, so they run on one thread of
their own, in the order of the calls, and the event loop never waits. An idle group costs nothing: a
thread that waits for a call does not spin.

A peer that dies shows at once as a closed connection; one that is stuck shows after the time-out.
"""

import asyncio
import os
import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed

from services.parallel.ballots import BallotShape, check_commands, check_rank
from services.parallel.interface import COMMAND_BYTES_MAX, GroupBroken

FRAME_BYTES: Final = 1024
"""What one collective carries: the length of the commands, and as much of them as fits."""
LENGTH_BYTES: Final = 8

SOURCE_PLACE: Final = re.compile(r"^\[[^\]]*\] ")
ADVICE: Final = " This is typically caused by"

Outcome = TypeVar("Outcome")

c10d: Any = torch.distributed
"""Untyped: the stubs lack the classes' methods."""
ProcessGroup = Any


class GlooGroup:
    """`services.parallel.interface.RankGroup` of one process per rank. Made by `join`."""

    def __init__(
        self, rank: int, size: int, group: ProcessGroup, timeout_s: float, thread: ThreadPoolExecutor
    ) -> None:
        self._rank = rank
        self._size = size
        self._group: ProcessGroup = group
        self._timeout_s = timeout_s
        self._thread = thread
        self._shape = BallotShape()
        self._turn = 0
        self._broken: str | None = None

    @classmethod
    async def join(cls, rank: int, size: int, host: str, port: int, timeout_s: float) -> "GlooGroup":
        """Meet the other ranks at `host:port`, where rank 0 listens, and wait for all of them.

        `timeout_s` bounds each step of this and every collective. A rank listens only at the address
        from which it reaches rank 0 (GLOO_SOCKET_IFNAME, torch's own variable, names another network).
        Raises GroupBroken if not all ranks come in time or the address cannot be used, ValueError for
        a rank that cannot be.
        """
        check_rank(rank, size)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agreement")
        meeting = thread.submit(_rendezvous, rank, size, host, port, timeout_s)
        try:
            group = await asyncio.wrap_future(meeting)
        except (RuntimeError, OSError) as error:
            thread.shutdown(wait=False)
            raise GroupBroken(
                f"rank {rank} of {size} has not met its group at {host}:{port}, waiting at most "
                f"{timeout_s:g} s: {_first_line(error)}"
            ) from error
        except asyncio.CancelledError:
            thread.shutdown(wait=False)
            raise
        return cls(rank, size, group, timeout_s, thread)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        first = self._shape.words is None
        self._shape.check(ballot)
        self._turn += 1
        words = list(ballot)
        if first:
            least, most = await self._run(lambda group: _least(group, [len(words), -len(words)]))
            if least != -most:
                raise self._break(f"turn {self._turn}: ranks brought ballots of {least} to {-most} words")
        return await self._run(lambda group: _least(group, words))

    async def broadcast(self, commands: bytes | None) -> bytes:
        check_commands(self._rank, commands)
        return await self._run(lambda group: _leaders(group, commands))

    async def close(self) -> None:
        if self._broken is None:
            self._broken = f"rank {self._rank} has left the group"
        self._group = None
        # A collective under way ends by its own time-out; nobody waits for it here.
        self._thread.shutdown(wait=False)

    async def _run(self, collective: Callable[[ProcessGroup], Outcome]) -> Outcome:
        if self._broken is not None or self._group is None:
            raise GroupBroken(self._broken)
        attempt = self._thread.submit(_attempt, collective, self._group)
        try:
            outcome, problem = await asyncio.wrap_future(attempt)
        except asyncio.CancelledError:
            # The collective goes on without its caller: this rank no longer knows what was agreed.
            self._break(f"turn {self._turn}: rank {self._rank} was cancelled while it waited")
            raise
        if problem is not None:
            waited = f"rank {self._rank} waited for its group, at most {self._timeout_s:g} s"
            raise self._break(f"turn {self._turn}: {waited}: {problem}")
        return outcome[0]

    def _break(self, why: str) -> GroupBroken:
        """Let go of the connections as well, so that the other ranks learn it at once."""
        self._broken, self._group = why, None
        return GroupBroken(why)


def _attempt(
    collective: Callable[[ProcessGroup], Outcome], group: ProcessGroup
) -> tuple[list[Outcome], str | None]:
    """The outcome, or what went wrong: as text, since an exception's frames would hold the group."""
    try:
        return [collective(group)], None
    except RuntimeError as error:
        return [], _first_line(error)


def _rendezvous(rank: int, size: int, host: str, port: int, timeout_s: float) -> ProcessGroup:
    timeout = timedelta(seconds=timeout_s)
    # The store would listen on every network of the machine; it is handed a socket that does not.
    listening = socket.create_server((host, port)).detach() if rank == 0 else None
    store = c10d.TCPStore(host, port, size, rank == 0, timeout, master_listen_fd=listening)
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        group = c10d.ProcessGroupGloo(store, rank, size, timeout)
    else:
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address_toward(host, port))]
        group = c10d.ProcessGroupGloo(store, rank, size, options)
    _least(group, [0])  # every rank has met every other, and the store is not needed any more
    return group


def _address_toward(host: str, port: int) -> str:
    """This machine's address on the way to `host`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _least(group: ProcessGroup, words: list[int]) -> list[int]:
    tensor = torch.tensor(words, dtype=torch.int64)
    options = c10d.AllreduceOptions()
    options.reduceOp = c10d.ReduceOp.MIN
    group.allreduce([tensor], options).wait()
    return [int(word) for word in tensor.tolist()]


def _leaders(group: ProcessGroup, commands: bytes | None) -> bytes:
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    if commands is not None:
        head = len(commands).to_bytes(LENGTH_BYTES, "little") + commands[: FRAME_BYTES - LENGTH_BYTES]
        frame[: len(head)] = _bytes_tensor(head)
    _send(group, frame)
    head = frame.numpy().tobytes()
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > COMMAND_BYTES_MAX:
        raise RuntimeError(f"the leader announced {length} bytes of commands")
    first = head[LENGTH_BYTES : LENGTH_BYTES + length]
    if length == len(first):
        return first
    rest = torch.empty(length - len(first), dtype=torch.uint8)
    if commands is not None:
        rest = _bytes_tensor(commands[len(first) :])
    _send(group, rest)
    return first + rest.numpy().tobytes()


def _send(group: ProcessGroup, tensor: torch.Tensor) -> None:
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    """Without the place in torch's sources before it, and the advice and C++ stack after it."""
    return SOURCE_PLACE.sub("", str(error).partition("\n")[0]).partition(ADVICE)[0]
