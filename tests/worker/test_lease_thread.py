"""Tests that a worker's lease is renewed while its own event loop is blocked."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from baton.ids import Incarnation
from baton.rooms.errors import DeclaredGone
from baton.wire.baton.v1 import rooms_pb2, workers_pb2, workers_pb2_grpc
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.channel import Channels, open_thread_channel
from baton.wire.errors import KIND_KEY
from baton.wire.run_token import KEY as RUN_TOKEN
from baton.wire.service_role import ServiceRole
from baton.worker.lifecycle.lease_thread import LeaseThread
from tests.patience import PATIENCE_S
from tests.wire.servers import until


@dataclass
class ThreadedRegistry(workers_pb2_grpc.WorkerRegistryServicer):
    """A registry that runs in its own threads, so that it answers while the test's loop is blocked."""

    departed: list[int] = field(default_factory=list)
    gone: bool = False
    calls: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    """Run tokens that calls showed."""
    told: list[int] = field(default_factory=list)
    """The turns that renewals told of."""
    heard: threading.Condition = field(default_factory=threading.Condition)

    def wait_renewals(self, more: int) -> None:
        """Block the caller's thread until this many more renewals have come."""
        with self.heard:
            wanted = self.calls.count("renew") + more
            assert self.heard.wait_for(lambda: self.calls.count("renew") >= wanted, PATIENCE_S)

    def _note(self, call: str) -> None:
        with self.heard:
            self.calls.append(call)
            self.heard.notify_all()

    def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("register")
        self._refuse_the_gone(context)
        return workers_pb2.RegisterReply(lease_ms=150)

    def Renew(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.told.append(request.census.turns)
        self.tokens.update(value for key, value in context.invocation_metadata() if key == RUN_TOKEN)
        self._note("renew")
        self._refuse_the_gone(context)
        return workers_pb2.RenewReply(lease_ms=150, departed=self.departed)

    def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("drain")
        return workers_pb2.DrainReply(rooms=3)

    def Leave(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("leave")
        return workers_pb2.LeaveReply()

    def ReportExit(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError("a worker does not report its own exit")

    def SetWeight(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError("a worker does not weigh itself")

    def _refuse_the_gone(self, context: Any) -> None:
        if self.gone:
            context.set_trailing_metadata(((KIND_KEY, "DeclaredGone"),))
            context.abort(grpc.StatusCode.NOT_FOUND, "incarnation 5 was declared gone")


@pytest.fixture
def registry() -> ThreadedRegistry:
    return ThreadedRegistry()


@pytest.fixture
def address(registry: ThreadedRegistry) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    workers_pb2_grpc.add_WorkerRegistryServicer_to_server(registry, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(PATIENCE_S)


@dataclass
class LeaseHolder:
    lease: LeaseThread
    running: asyncio.Task[None]
    departed: list[int] = field(default_factory=list)
    tries: list[bool] = field(default_factory=list)
    turns: int = 0


@asynccontextmanager
async def keeping(address: str, channels: Channels | None = None) -> AsyncIterator[LeaseHolder]:
    found: list[LeaseHolder] = []
    lease = LeaseThread(
        BootstrapAddresses(address.split(",")),
        Channels.showing(None, "sesame", open_thread_channel) if channels is None else channels,
        workers_pb2.RegisterRequest(worker=rooms_pb2.Peer(name="w", incarnation=5, address="a:1")),
        lambda gone: found[0].departed.extend(gone),
        lambda held: found[0].tries.append(held),
        lambda _: workers_pb2.RenewRequest(
            census=workers_pb2.WorkerCensus(turns=found[0].turns if found else 0)
        ),
        lambda: found[0].turns,
    )
    found.append(LeaseHolder(lease, asyncio.create_task(lease.run())))
    try:
        yield found[0]
    finally:
        found[0].running.cancel()
        await asyncio.gather(found[0].running, return_exceptions=True)
        await lease.stop()
        assert "lease" not in {thread.name for thread in threading.enumerate()}


async def test_live_is_not_lost_a_lease_is_renewed_while_the_workers_loop_is_held(
    registry: ThreadedRegistry, address: str
) -> None:
    async with keeping(address) as worker:
        await until(lambda: worker.lease.problem is None)
        registry.departed = [8, 9]
        registry.wait_renewals(6)  # two leases: nothing of this loop runs meanwhile
        assert worker.departed == []
        assert registry.calls.count("register") == 1
        await until(lambda: worker.departed == [Incarnation(8), Incarnation(9)])
        assert set(worker.tries) == {True}
        assert registry.tokens == {"sesame"}


async def test_what_is_told_of_a_worker_is_what_its_own_loop_saw(
    registry: ThreadedRegistry, address: str
) -> None:
    async with keeping(address) as worker:
        await until(lambda: len(registry.told) >= 1)
        worker.turns = 7
        registry.wait_renewals(3)
        assert 7 not in registry.told
        await until(lambda: registry.told[-1] == 7)


async def test_a_renewal_shows_the_certificate_of_now(registry: ThreadedRegistry, address: str) -> None:
    opened, version = list[int](), 0

    def opener(address: str, party: ServiceRole) -> Any:
        opened.append(version)
        return open_thread_channel(address, party)

    async with keeping(address, Channels(opener, lambda: version)) as worker:
        await until(lambda: worker.lease.problem is None)
        version = 1
        await until(lambda: opened == [0, 1])
        registry.wait_renewals(3)
        assert opened == [0, 1]
        assert set(worker.tries) == {True}, "it is no reason to lose a lease"


async def test_it_drains_and_leaves_by_the_same_way(registry: ThreadedRegistry, address: str) -> None:
    async with keeping(address) as worker:
        await until(lambda: worker.lease.problem is None)
        assert await worker.lease.drain() == 3
        await worker.lease.leave()
        assert [call for call in registry.calls if call != "renew"] == ["register", "drain", "leave"]
        await asyncio.wait_for(worker.running, PATIENCE_S)


async def test_that_it_was_declared_gone_reaches_the_workers_loop(
    registry: ThreadedRegistry, address: str
) -> None:
    async with keeping(address) as worker:
        await until(lambda: worker.lease.problem is None)
        registry.gone = True
        with pytest.raises(DeclaredGone, match="incarnation 5"):
            await asyncio.wait_for(worker.running, PATIENCE_S)


async def test_who_gives_up_waiting_for_a_bootstrap_that_is_silent_waits_no_longer(address: str) -> None:
    async with keeping("127.0.0.1:1") as worker:
        await until(lambda: "unreachable" in str(worker.lease.problem))
        async with asyncio.timeout(PATIENCE_S):
            assert await worker.lease.drain() == 0
        assert False in worker.tries
