"""Processes for the ranks of a worker that serve several tests. Each can join any rank group."""

import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed

from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from baton.inference.process_group import ProcessCollectives, join_rank_group
from baton.topology import Topology
from tests.forks import ForkedProcess, fork_answering

PATIENCE_S: Final = 120.0
TIMEOUT_S: Final = 60.0
HOST: Final = "127.0.0.1"

c10d: Any = torch.distributed


@dataclass(frozen=True)
class Post:
    """One rank's place in a scenario: its number, its group's shape and port, and the time limit."""

    topology: Topology
    rank: int
    port: int
    timeout_s: float

    def rank_group(self) -> ProcessCollectives:
        return join_rank_group(self.topology, self.rank, HOST, self.port, self.timeout_s, torch.device("cpu"))

    def engine(self, directory: Path, dtype: str = "float32", kv_cache_memory: int = 2**21) -> TorchEngine:
        return load_engine(
            directory,
            dtype=dtype,
            device="cpu",
            kv_cache_memory=kv_cache_memory,
            threads=1,
            topology=self.topology,
            rank=self.rank,
            rank_group=self.rank_group(),
        )


Scene = Callable[..., Any]
"""Function that one rank runs: its post, and the test's arguments."""


class Crew:
    """Processes that run one scenario after the other. A rank that a scenario ended is replaced."""

    def __init__(self) -> None:
        self._members: list[tuple[ForkedProcess, Connection]] = []

    def play(self, topology: Topology, scene: Scene, *given: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Return what each rank returned, by rank, None of one that died. Raises what a rank raised."""
        cast = self.start(topology, scene, *given, timeout_s=timeout_s)
        told = [self.answer(rank) for rank in range(cast)]
        for rank, each in enumerate(told):
            if isinstance(each, BaseException):
                raise AssertionError(f"rank {rank} raised: {each}") from each  # noqa: TRY004
        return told

    def start(self, topology: Topology, scene: Scene, *given: Any, timeout_s: float = TIMEOUT_S) -> int:
        self._fill(topology.ranks)
        listening = socket.create_server((HOST, 0))
        port = listening.getsockname()[1]
        # Kept until the next scene: ranks join through it.
        self._store = c10d.TCPStore(
            HOST,
            port,
            None,
            True,
            timedelta(seconds=TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        for rank in range(topology.ranks):
            self._members[rank][1].send((scene, Post(topology, rank, port, timeout_s), given))
        return topology.ranks

    def answer(self, rank: int) -> Any:
        process, pipe = self._members[rank]
        if not pipe.poll(PATIENCE_S):
            raise TimeoutError(f"rank {rank} did not answer within {PATIENCE_S:g} s")
        try:
            return pipe.recv()
        except EOFError:
            process.wait()
            return None

    def pid(self, rank: int) -> int:
        return self._members[rank][0].pid

    def close(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.wait()
        self._members.clear()

    def _fill(self, size: int) -> None:
        for place, (process, _) in enumerate(self._members):
            if process.poll() is not None:
                self._members[place] = _member()
        while len(self._members) < size:
            self._members.append(_member())


def _member() -> tuple[ForkedProcess, Connection]:
    return fork_answering(_serve, ())


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            scene, post, given = pipe.recv()
            try:
                pipe.send(scene(post, *given))
            except Exception as error:
                pipe.send(AssertionError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
