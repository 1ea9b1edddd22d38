"""Collectives between the processes of a rank group, over gloo between CPUs and NCCL between GPUs.

They use process groups of their own, apart from torch's default one and from that by which ranks agree on
votes. Ranks meet in the store that the first rank of that agreement hosts. A rank that dies shows at once as
a closed connection. A rank that is stuck shows after the timeout. On GPUs a collective is queued, and waited
for at the end of the step. There NCCL's own watchdog ends the process of a rank that never stops waiting.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed

from baton.engine_interface import RankGroupBroken
from baton.pages.kv_checksum import WORD
from baton.runtime.gloo_connections import address_toward, connect_gloo, first_line, set_timeout
from baton.runtime.setting_kinds import split_address
from baton.topology import Topology

NAME: Final = "team"
LOADING_S: Final = 600.0
"""Longest time that ranks wait for the slowest one to load its part of the model, in seconds."""

TAG: Final = 0

Outcome = TypeVar("Outcome")

c10d: Any = torch.distributed
"""Module torch.distributed, untyped because torch's type stubs lack the methods of its classes."""
Group = Any


class ProcessCollectives:
    """`Collectives` of a rank group with one process per rank. `join_rank_group` makes it."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        device: torch.device,
        timeout_s: float,
        everyone: Group,
        stage: Group | None,
    ) -> None:
        """Store the process groups of this rank.

        `everyone`: group of all ranks. `stage`: group of the tensor-parallel ranks of this rank's pipeline
        stage, or None if there is only one.
        """
        self.topology = topology
        self.rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._groups: tuple[Group, Group | None] | None = (everyone, stage)
        self._broken = ""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.topology.tensor == 1 or tensor.numel() == 0:
            return tensor
        tensor = tensor.contiguous()
        self._run(lambda _, stage: _reduce(stage, tensor, c10d.ReduceOp.SUM))
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        ranks = self.topology.tensor
        if ranks == 1 or tensor.numel() == 0:
            return tensor
        tensor = tensor.contiguous()
        first = self.topology.coordinates(self.rank).tensor == 0
        parts = [torch.empty_like(tensor) for _ in range(ranks)] if first else []

        def collect(_: Group, stage: Group) -> None:
            options = c10d.GatherOptions()
            options.rootRank = 0
            stage.gather([parts] if first else [], [tensor], options).wait()

        self._run(collect)
        return torch.cat(parts, dim=-1) if first else tensor

    def send(self, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        after = self.rank + self.topology.tensor * self.topology.context
        self._run(lambda everyone, _: everyone.send([tensor], after, TAG).wait())

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        before = self.rank - self.topology.tensor * self.topology.context
        self._run(lambda everyone, _: everyone.recv([tensor], before, TAG).wait())
        return tensor

    def broadcast(self, rank: int, words: Sequence[float] | None, count: int) -> list[float]:
        values = torch.zeros(count, dtype=torch.float64)
        if words is not None:
            values.copy_(torch.tensor(words, dtype=torch.float64))
        values = values.to(self._device)

        def broadcast(everyone: Group, _: Group) -> list[float]:
            options = c10d.BroadcastOptions()
            options.rootRank = rank
            options.rootTensor = 0
            everyone.broadcast([values], options).wait()
            return values.tolist()

        return self._run(broadcast)

    def sum_integers(self, numbers: Sequence[int]) -> list[int]:
        signed = [each - 2**64 if each >= 2**63 else each for each in numbers]
        return [each & WORD for each in self._agree(signed, c10d.ReduceOp.SUM, self._timeout_s)]

    def minimum(self, number: int) -> int:
        return self._agree([number], c10d.ReduceOp.MIN, max(LOADING_S, self._timeout_s))[0]

    def leave(self, why: str) -> RankGroupBroken:
        """Close this rank's connections, so that the other ranks notice at once, and return the error to
        raise."""
        if not self._broken:
            self._broken = f"rank {self.rank} of {self.topology.ranks}: {why}"
        self._groups = None
        return RankGroupBroken(self._broken)

    def _agree(self, numbers: Sequence[int], operation: Any, timeout_s: float) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)

        def reduced(everyone: Group, _: Group) -> list[int]:
            _reduce(everyone, tensor, operation, timeout_s)
            return [int(each) for each in tensor.tolist()]

        return self._run(reduced, timeout_s)

    def _run(self, collective: Callable[[Group, Group], Outcome], timeout_s: float | None = None) -> Outcome:
        problem = self._broken
        if self._groups is not None:
            try:
                return collective(*self._groups)
            except RuntimeError as error:  # as text: frames of the exception would keep the groups alive
                problem = first_line(error)
        most = self._timeout_s if timeout_s is None else timeout_s
        raise self.leave(f"waited for the other ranks of its step, at most {most:g} s: {problem}")


def join_rank_group(
    topology: Topology,
    rank: int,
    host: str,
    port: int,
    timeout_s: float,
    device: torch.device,
    step_timeout_s: float | None = None,
) -> ProcessCollectives:
    """Connect this rank with all others through the store at `host:port`. Blocks until all have come.

    `timeout_s`: longest wait for them. `step_timeout_s`: longest wait in each later collective, in which
    ranks wait for others to compute. The same by default.
    A rank listens only at the address from which it reaches the store. GLOO_SOCKET_IFNAME or
    NCCL_SOCKET_IFNAME choose another network.
    Raises RankGroupBroken if not all ranks come in time, ValueError for an impossible rank.
    """
    own = topology.coordinates(rank)
    step_timeout_s = step_timeout_s or timeout_s
    try:
        waiting, timeout = timedelta(seconds=timeout_s), timedelta(seconds=step_timeout_s)
        store = c10d.PrefixStore(NAME, c10d.TCPStore(host, port, None, False, waiting, False))
        store.set(f"rank-{rank}", "here")
        store.wait([f"rank-{each}" for each in range(topology.ranks)], waiting)

        def group(name: str, own: int, size: int) -> Group:
            under = c10d.PrefixStore(name, store)
            if device.type == "cuda":
                return _nccl(under, own, size, timeout, device)
            return connect_gloo(c10d, under, own, size, timeout, host, port)

        everyone = group("all", rank, topology.ranks)
        stage = None
        if topology.tensor > 1:
            stage = group(f"stage-{own.pipeline}-{own.context}", own.tensor, topology.tensor)
        token = torch.zeros(1, dtype=torch.int64, device=device)
        for made in (everyone, stage):
            if made is not None:
                _reduce(made, token, c10d.ReduceOp.SUM)
        token.tolist()
    except (RuntimeError, OSError) as error:
        raise RankGroupBroken(
            f"rank {rank} of {topology.ranks} has not met its team at {host}:{port}, waiting at most "
            f"{timeout_s:g} s: {first_line(error)}"
        ) from None
    return ProcessCollectives(topology, rank, device, step_timeout_s, everyone, stage)


def join_default_group(rendezvous: str, topology: Topology, rank: int) -> None:
    """Make torch's default process group of all ranks, in which another package makes groups of its own.

    `rendezvous`: address of the store, "HOST:PORT", if there are several ranks. Gloo listens only at the
    network interface toward it, unless GLOO_SOCKET_IFNAME chooses another. Once in a process.
    """
    if c10d.is_initialized():
        return
    store = c10d.HashStore()
    if topology.ranks > 1:
        import psutil  # of the extra `vllm`

        host, port = split_address(rendezvous)
        store, own = c10d.TCPStore(host, port, None, False), address_toward(host, port)
        for name, addresses in psutil.net_if_addrs().items():
            if own in {each.address for each in addresses}:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = c10d.PrefixStore("default", store)
    c10d.init_process_group(backend, store=store, rank=rank, world_size=topology.ranks)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> Group:
    torch.cuda.set_device(device)
    options = c10d.ProcessGroupNCCL.Options()
    set_timeout(options, timeout)
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _reduce(group: Group, tensor: torch.Tensor, operation: Any, timeout_s: float | None = None) -> None:
    options = c10d.AllreduceOptions()
    options.reduceOp = operation
    if timeout_s is not None:
        options.timeout = timedelta(seconds=timeout_s)
    group.allreduce([tensor], options).wait()
