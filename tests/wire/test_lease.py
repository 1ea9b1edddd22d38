"""Does a worker keep its lease, say once why it has none, and hear once of each departed peer?"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from services.rooms.errors import NameInUse, UnknownWorker, WorkerRefused
from services.wire import lease as module
from services.wire.baton.v1 import rooms_pb2, workers_pb2, workers_pb2_grpc
from services.wire.errors import errors_as_status
from services.wire.lease import LeaseKeeper
from tests.wire.servers import channel_to, serving, until


@dataclass
class Registry(workers_pb2_grpc.WorkerRegistryServicer):
    refusals: list[Exception] = field(default_factory=list)
    """Of registrations, one each."""
    departed: list[int] = field(default_factory=list)
    known: bool = False
    unproven: bool = False
    calls: list[str] = field(default_factory=list)

    async def Register(self, request: Any, context: Any) -> workers_pb2.RegisterReply:  # noqa: N802
        async with errors_as_status(context):
            self.calls.append("register")
            if self.refusals:
                raise self.refusals.pop(0)
        self.known = True
        return workers_pb2.RegisterReply(lease_ms=150)

    async def Renew(self, request: Any, context: Any) -> workers_pb2.RenewReply:  # noqa: N802
        async with errors_as_status(context):
            self.calls.append("renew")
            if not self.known:
                raise UnknownWorker("who?")
        return workers_pb2.RenewReply(lease_ms=150, departed=self.departed, unproven=self.unproven)

    async def Drain(self, request: Any, context: Any) -> workers_pb2.DrainReply:  # noqa: N802
        self.calls.append("drain")
        return workers_pb2.DrainReply()

    async def Leave(self, request: Any, context: Any) -> workers_pb2.LeaveReply:  # noqa: N802
        self.calls.append("leave")
        return workers_pb2.LeaveReply()

    async def ReportExit(self, request: Any, context: Any) -> workers_pb2.ReportExitReply:  # noqa: N802
        raise NotImplementedError("a worker does not report its own exit")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(module, "RETRY_MAX_S", 0.002)


class Bench:
    def __init__(self, channel: grpc.aio.Channel, registry: Registry) -> None:
        self.registry = registry
        self.departed: list[list[int]] = []
        self.renewals = 0
        self.failures = 0
        request = workers_pb2.RegisterRequest(worker=rooms_pb2.Peer(name="w", incarnation=5, address="a:1"))
        self.keeper = LeaseKeeper(
            channel, request, lambda gone: self.departed.append(list(gone)), self._tried
        )

    def _tried(self, held: bool) -> None:
        if held:
            self.renewals += 1
        else:
            self.failures += 1


@asynccontextmanager
async def keeping(registry: Registry) -> AsyncIterator[Bench]:
    def add(server: grpc.aio.Server) -> None:
        workers_pb2_grpc.add_WorkerRegistryServicer_to_server(registry, server)

    async with serving(add) as address, channel_to(address) as channel:
        bench = Bench(channel, registry)
        task = asyncio.ensure_future(bench.keeper.run())
        try:
            yield bench
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_it_registers_once_and_renews_again_and_again() -> None:
    async with keeping(Registry()) as at:
        assert at.keeper.problem == "not registered yet"
        await until(lambda: at.renewals >= 3)
        assert at.keeper.problem is None
        assert at.registry.calls.count("register") == 1


async def test_a_bootstrap_that_does_not_know_it_gets_a_new_registration() -> None:
    async with keeping(Registry()) as at:
        await until(lambda: at.renewals >= 1)
        at.registry.known = False
        await until(lambda: at.registry.calls.count("register") == 2)
        await until(lambda: at.keeper.problem is None)


async def test_each_refusal_is_told_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    held = [NameInUse(f"w is held for {left} ms") for left in (900, 800, 700)]
    differs = [WorkerRefused("dtype", "float32", "bfloat16") for _ in range(3)]
    async with keeping(Registry(refusals=[*held, *differs])) as at:
        await until(lambda: len(at.registry.refusals) == 0)
        await until(lambda: at.renewals >= 1)
    assert [record.getMessage() for record in caplog.records].count("no lease") == 2
    assert at.failures == len(held) + len(differs)


async def test_a_departed_peer_is_reported_once() -> None:
    async with keeping(Registry(departed=[8])) as at:
        await until(lambda: at.renewals >= 2)
        at.registry.departed = [8, 9]
        await until(lambda: at.renewals >= 5)
        assert at.departed == [[8], [9]]


async def test_a_draining_worker_that_has_to_register_again_stays_draining() -> None:
    async with keeping(Registry()) as at:
        await until(lambda: at.renewals >= 1)
        await at.keeper.drain()
        at.registry.known = False
        await until(lambda: at.registry.calls.count("register") == 2)
        await until(lambda: at.registry.calls.count("drain") == 2)
        await at.keeper.leave()
        assert at.registry.calls.count("leave") == 1


async def test_without_a_bootstrap_it_says_so_and_goes_on_trying(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with channel_to("127.0.0.1:1") as channel:
        at = Bench(channel, Registry())
        task = asyncio.ensure_future(at.keeper.run())
        await until(lambda: at.keeper._failures > module.UNREACHABLE_TRIES)
        assert at.keeper.problem is not None
        assert "unreachable" in at.keeper.problem
        await at.keeper.drain()
        await at.keeper.leave()
        task.cancel()
    assert [record.getMessage() for record in caplog.records].count("no lease") == 1
