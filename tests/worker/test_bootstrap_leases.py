"""Tests of a worker's leases at several bootstraps, each with rooms of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from baton.ids import Opener
from baton.rooms.errors import DeclaredGone, UnknownWorker
from baton.wire.baton.v1 import rooms_pb2, workers_pb2, workers_pb2_grpc
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.channel import Channels
from baton.wire.service_role import ServiceRole
from baton.worker.lifecycle import bootstrap_leases, lease_keeper
from baton.worker.lifecycle.bootstrap_leases import BootstrapLeases
from baton.worker.lifecycle.lease_keeper import LeaseKeeper
from tests.patience import PATIENCE_S
from tests.wire.servers import serving, until
from tests.worker.test_lease_keeper import ScriptedRegistry

NOBODY = "127.0.0.1:1"


class ListedAddresses(BootstrapAddresses):
    """Addresses of a name, which the test sets."""

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__(addresses)
        self.listed = list(addresses)
        self.looks = 0

    @property
    def may_change(self) -> bool:
        return True

    async def look_up(self, within_s: float = 0.0) -> list[str]:
        self.looks += 1
        return list(self.listed)


class Worker:
    """A worker with its leases, and what they reported to it."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = ListedAddresses(addresses)
        self.channels = Channels()
        self.leases = BootstrapLeases(self.addresses, self._make_keeper, self._use)
        self.routers: Mapping[Opener, str] = {}
        self.gone: Sequence[Opener] = ()
        self.departed: list[int] = []
        self.entered = {Opener(1): 11, Opener(2): 22}
        """Highest room of each opener."""
        self.running = asyncio.create_task(self.leases.run())

    def _make_keeper(self, address: str, on_opener: Callable[[Opener, Opener], None]) -> LeaseKeeper:
        peer = rooms_pb2.Peer(name="w", incarnation=5, address="a:1")
        return LeaseKeeper(
            self.channels.to(address, ServiceRole.BOOTSTRAP),
            workers_pb2.RegisterRequest(worker=peer),
            self.departed.extend,
            lambda _: None,
            self._holds,
            on_opener=on_opener,
        )

    def _holds(self, opener: Opener) -> workers_pb2.RenewRequest:
        return workers_pb2.RenewRequest(load=rooms_pb2.WorkerLoad(entered=self.entered.get(opener, 0)))

    def _use(self, routers: Mapping[Opener, str], gone: Sequence[Opener]) -> None:
        self.routers, self.gone = routers, gone


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_keeper, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(lease_keeper, "RETRY_MAX_S", 0.002)
    monkeypatch.setattr(bootstrap_leases, "LOOK_S", 0.002)
    monkeypatch.setattr(bootstrap_leases, "UNLISTED_S", 0.01)


@asynccontextmanager
async def registered(
    *registries: ScriptedRegistry, also: Sequence[str] = ()
) -> AsyncIterator[tuple[Worker, list[str]]]:
    """Run a worker that knows these bootstraps, and the addresses in `also`. Yield it with the bootstraps'
    addresses."""
    async with AsyncExitStack() as stack:
        adders = [
            partial(workers_pb2_grpc.add_WorkerRegistryServicer_to_server, registry)
            for registry in registries
        ]
        addresses = [await stack.enter_async_context(serving(add)) for add in adders]
        worker = Worker([*addresses, *also])
        try:
            yield worker, addresses
        finally:
            worker.running.cancel()
            await asyncio.gather(worker.running, return_exceptions=True)
            await worker.channels.close()


def two(**settings: object) -> tuple[ScriptedRegistry, ScriptedRegistry]:
    first, second = ScriptedRegistry(opener=1), ScriptedRegistry(opener=2)
    for name, value in settings.items():
        setattr(first, name, value)
        setattr(second, name, value)
    return first, second


async def test_it_holds_a_lease_at_each_and_knows_each_by_its_opener() -> None:
    async with registered(*two()) as (worker, addresses):
        assert worker.leases.problem == "not registered yet"
        await until(lambda: worker.leases.census == (2, 2))
        assert worker.leases.problem is None
        assert worker.leases.missing == []
        await until(lambda: worker.routers == {Opener(1): addresses[0], Opener(2): addresses[1]})
        assert worker.gone == []


async def test_one_that_is_missing_is_named_and_the_worker_is_ready() -> None:
    async with registered(ScriptedRegistry(opener=1), also=[NOBODY]) as (worker, _):
        await until(lambda: worker.leases.census == (1, 2) and worker.leases.proven)
        assert worker.leases.problem is None
        await until(lambda: "bootstrap unreachable" in str(worker.leases.missing))
        [missing] = worker.leases.missing
        assert missing.startswith(f"{NOBODY}: ")


async def test_honest_health_without_any_lease_each_reason_is_given() -> None:
    async with registered(also=["127.0.0.1:1", "127.0.0.1:2"]) as (worker, _):
        await until(lambda: str(worker.leases.problem).count("bootstrap unreachable") == 2)
        assert worker.leases.missing == [], "the problem says it"
        assert worker.leases.census == (0, 2)


async def test_honest_health_it_is_proven_where_it_has_a_lease() -> None:
    first, second = two(unproven=True)
    async with registered(first, second) as (worker, _):
        await until(lambda: worker.leases.census == (2, 2))
        assert not worker.leases.proven
        second.unproven = False
        await until(lambda: worker.leases.proven)


async def test_opener_owns_each_is_told_of_its_own_rooms() -> None:
    first, second = two()
    async with registered(first, second):
        await until(lambda: first.entered[-1:] == [11] and second.entered[-1:] == [22])
        assert set(first.entered) <= {0, 11}
        assert set(second.entered) <= {0, 22}


async def test_a_lease_that_ends_at_one_ends_nothing_at_the_other() -> None:
    first, second = two()
    async with registered(first, second) as (worker, _):
        await until(lambda: worker.leases.census == (2, 2))
        first.refusals, first.known = [UnknownWorker("not now")] * 10_000, False
        await until(lambda: worker.leases.census == (1, 2))
        renewed = second.calls.count("renew")
        await until(lambda: second.calls.count("renew") > renewed + 2)
        assert second.calls.count("register") == 1
        assert not worker.running.done()


async def test_another_process_at_an_address_is_another_opener_and_the_former_is_gone() -> None:
    first, second = two()
    async with registered(first, second) as (worker, addresses):
        await until(lambda: len(worker.routers) == 2)
        first.opener, first.known = 3, False
        await until(lambda: worker.routers == {Opener(3): addresses[0], Opener(2): addresses[1]})
        assert worker.gone == [Opener(1)]


async def test_drain_waits_for_the_rooms_of_all_and_leave_reaches_each() -> None:
    first, second = two(rooms=2)
    async with registered(first, second, also=[NOBODY]) as (worker, _):
        await until(lambda: worker.leases.census == (2, 3))
        second.rooms = 3
        assert await worker.leases.drain() == 5, "one that cannot be reached counts 0"
        await worker.leases.leave()
        # A renewal that was under way may arrive behind it.
        assert all("leave" in each.calls[-2:] for each in (first, second))
        await asyncio.wait_for(worker.running, PATIENCE_S)


async def test_gone_is_monotone_any_bootstrap_may_report_it_and_none_takes_it_back() -> None:
    first, second = two()
    async with registered(first, second) as (worker, _):
        await until(lambda: worker.leases.census == (2, 2))
        first.departed = [8]
        await until(lambda: worker.departed == [8])
        first.departed, second.departed = [], [9]
        await until(lambda: worker.departed == [8, 9])


@pytest.mark.parametrize("which", [0, 1])
async def test_a_worker_that_any_bootstrap_declared_gone_ends(which: int) -> None:
    registries = two()
    async with registered(*registries) as (worker, _):
        await until(lambda: worker.leases.census == (2, 2))
        registries[which].refusals = [DeclaredGone("incarnation 5 was declared gone")] * 2
        registries[which].known = False
        with pytest.raises(DeclaredGone, match="incarnation 5"):
            await asyncio.wait_for(worker.running, PATIENCE_S)


async def test_a_bootstrap_that_is_listed_later_gets_a_lease() -> None:
    first, second = two()
    async with registered(first, second) as (worker, addresses):
        worker.addresses.listed = addresses[:1]
        await until(lambda: worker.leases.census[0] >= 1)
        worker.addresses.listed = list(addresses)
        await until(lambda: len(worker.routers) == 2)
        assert worker.leases.census == (2, 2)


async def test_a_bootstrap_that_is_listed_no_more_is_kept_as_long_as_it_answers() -> None:
    first, second = two()
    async with registered(first, second) as (worker, addresses):
        await until(lambda: worker.leases.census == (2, 2))
        worker.addresses.listed = addresses[:1]
        looks = worker.addresses.looks
        await until(lambda: worker.addresses.looks > looks + 20)
        assert worker.leases.census == (2, 2)
        second.refusals, second.known = [UnknownWorker("not now")] * 10_000, False
        await until(lambda: worker.leases.census == (1, 1))
        assert worker.gone == [Opener(2)]
        assert not worker.running.done()


async def test_a_bootstrap_under_another_address_is_not_gone() -> None:
    registry = ScriptedRegistry(opener=1)
    async with registered(registry, registry) as (worker, addresses):
        await until(lambda: worker.leases.census == (2, 2))
        worker.addresses.listed = addresses[1:]
        await until(lambda: worker.leases.census == (1, 1))
        assert worker.routers == {Opener(1): addresses[1]}
        assert worker.gone == []
