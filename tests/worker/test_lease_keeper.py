"""Tests of a worker's lease: registration, renewal, refusals logged once, and departed peers reported
once."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from baton.rooms.errors import DeclaredGone, NameInUse, UnknownWorker, WorkerRefused
from baton.wire.baton.v1 import rooms_pb2, workers_pb2, workers_pb2_grpc
from baton.wire.errors import errors_as_status
from baton.worker.lifecycle import lease_keeper as module
from baton.worker.lifecycle.lease_keeper import LeaseKeeper, Stall
from tests.patience import PATIENCE_S
from tests.wire.servers import channel_to, serving, until


@dataclass
class ScriptedRegistry(workers_pb2_grpc.WorkerRegistryServicer):
    refusals: list[Exception] = field(default_factory=list)
    """Errors that refuse the next registrations, one each."""
    departed: list[int] = field(default_factory=list)
    known: bool = False
    unproven: bool = False
    calls: list[str] = field(default_factory=list)
    held_up: asyncio.Event | None = None
    """Event that renewals wait for in a queue."""
    turns_ms: list[int] = field(default_factory=list)
    """Turn times that the worker's renewals reported, ms."""
    weight: int | None = None
    """Prefill weight of the worker's process that replies to renewals tell, or None."""
    registered: list[workers_pb2.RegisterRequest] = field(default_factory=list)
    opener: int = 0
    rooms: int = 0
    """Rooms for which the bootstrap waits when it is asked to open no more."""
    entered: list[int] = field(default_factory=list)
    """Highest ids that renewals reported."""

    async def Register(self, request: Any, context: Any) -> workers_pb2.RegisterReply:  # noqa: N802
        async with errors_as_status(context):
            self.calls.append("register")
            self.registered.append(request)
            if self.refusals:
                raise self.refusals.pop(0)
        self.known = True
        return workers_pb2.RegisterReply(lease_ms=150, opener=self.opener)

    async def Renew(self, request: Any, context: Any) -> workers_pb2.RenewReply:  # noqa: N802
        async with errors_as_status(context):
            self.calls.append("renew")
            self.turns_ms.append(request.turn_ms)
            self.entered.append(request.load.entered)
            departed = list(self.departed)
            if self.held_up is not None:
                await self.held_up.wait()
            if not self.known:
                raise UnknownWorker("who?")
        return workers_pb2.RenewReply(
            lease_ms=150,
            departed=departed,
            unproven=self.unproven,
            prefill_weight=self.weight,
            opener=self.opener,
        )

    async def Drain(self, request: Any, context: Any) -> workers_pb2.DrainReply:  # noqa: N802
        self.calls.append("drain")
        return workers_pb2.DrainReply(rooms=self.rooms)

    async def Leave(self, request: Any, context: Any) -> workers_pb2.LeaveReply:  # noqa: N802
        self.calls.append("leave")
        return workers_pb2.LeaveReply()

    async def ReportExit(self, request: Any, context: Any) -> workers_pb2.ReportExitReply:  # noqa: N802
        raise NotImplementedError("a worker does not report its own exit")

    async def SetWeight(self, request: Any, context: Any) -> workers_pb2.SetWeightReply:  # noqa: N802
        raise NotImplementedError("a worker does not weigh itself")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(module, "RETRY_MAX_S", 0.002)


class Bench:
    def __init__(
        self,
        channel: grpc.aio.Channel,
        registry: ScriptedRegistry,
        other: workers_pb2.OtherSide | None = None,
    ) -> None:
        self.registry = registry
        self.turns: Iterator[int] = itertools.count()
        self.departed: list[list[int]] = []
        self.renewals = 0
        self.failures = 0
        peer = rooms_pb2.Peer(name="w", incarnation=5, address="a:1")
        request = workers_pb2.RegisterRequest(worker=peer, other_side=other)
        self.keeper = LeaseKeeper(
            channel,
            request,
            lambda gone: self.departed.append(list(gone)),
            self._tried,
            turns=lambda: next(self.turns),
        )
        self.running: asyncio.Task[None] | None = None

    def _tried(self, held: bool) -> None:
        if held:
            self.renewals += 1
        else:
            self.failures += 1


@asynccontextmanager
async def keeping(
    registry: ScriptedRegistry, other: workers_pb2.OtherSide | None = None
) -> AsyncIterator[Bench]:
    def add(server: grpc.aio.Server) -> None:
        workers_pb2_grpc.add_WorkerRegistryServicer_to_server(registry, server)

    async with serving(add) as address, channel_to(address) as channel:
        bench = Bench(channel, registry, other)
        bench.running = task = asyncio.ensure_future(bench.keeper.run())
        try:
            yield bench
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_it_registers_once_and_renews_again_and_again() -> None:
    async with keeping(ScriptedRegistry()) as at:
        assert at.keeper.problem == "not registered yet"
        await until(lambda: at.renewals >= 3)
        assert at.keeper.problem is None
        assert at.registry.calls.count("register") == 1


async def test_a_bootstrap_that_does_not_know_it_gets_a_new_registration() -> None:
    async with keeping(ScriptedRegistry()) as at:
        await until(lambda: at.renewals >= 1)
        at.registry.known = False
        await until(lambda: at.registry.calls.count("register") == 2)
        await until(lambda: at.keeper.problem is None)


@pytest.mark.parametrize("weight", [0, 90])
async def test_it_registers_anew_by_the_weight_that_it_was_chosen_by(weight: int) -> None:
    other = workers_pb2.OtherSide(incarnation=6, process="both", prefill_weight=50)
    async with keeping(ScriptedRegistry(weight=weight), other) as at:
        await until(lambda: at.renewals >= 1)
        at.registry.known = False
        await until(lambda: len(at.registry.registered) == 2)
    assert [each.other_side.prefill_weight for each in at.registry.registered] == [50, weight]
    assert other.prefill_weight == 50, "what its settings say is theirs"


async def test_a_worker_of_one_side_registers_anew_as_it_is() -> None:
    async with keeping(ScriptedRegistry()) as at:
        await until(lambda: at.renewals >= 1)
        at.registry.known = False
        await until(lambda: len(at.registry.registered) == 2)
    assert not at.registry.registered[-1].HasField("other_side")


async def test_each_refusal_is_told_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    held = [NameInUse(f"w is held for {left} ms") for left in (900, 800, 700)]
    differs = [WorkerRefused("dtype", "float32", "bfloat16") for _ in range(3)]
    async with keeping(ScriptedRegistry(refusals=[*held, *differs])) as at:
        await until(lambda: len(at.registry.refusals) == 0)
        await until(lambda: at.renewals >= 1)
    assert [record.getMessage() for record in caplog.records].count("no lease") == 2
    assert at.failures == len(held) + len(differs)


async def test_a_departed_peer_is_reported_once() -> None:
    async with keeping(ScriptedRegistry(departed=[8])) as at:
        await until(lambda: at.renewals >= 2)
        at.registry.departed = [8, 9]
        await until(lambda: at.renewals >= 5)
        assert at.departed == [[8], [9]]


async def test_a_draining_worker_that_has_to_register_again_stays_draining() -> None:
    async with keeping(ScriptedRegistry()) as at:
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
        at = Bench(channel, ScriptedRegistry())
        task = asyncio.ensure_future(at.keeper.run())
        await until(lambda: at.failures > module.UNREACHABLE_TRIES)
        assert at.keeper.problem is not None
        assert "unreachable" in at.keeper.problem
        await at.keeper.drain()
        await at.keeper.leave()
        task.cancel()
    assert [record.getMessage() for record in caplog.records].count("no lease") == 1


async def test_live_is_not_lost_a_renewal_that_is_not_answered_keeps_no_other_from_being_sent() -> None:
    registry = ScriptedRegistry(held_up=asyncio.Event())
    async with keeping(registry) as at:
        await until(lambda: at.registry.calls.count("renew") >= 5)
        assert at.renewals == 0
        await until(lambda: "it has not answered for" in str(at.keeper.problem))
        assert registry.held_up is not None
        registry.held_up.set()
        await until(lambda: at.renewals >= 5)
        await until(lambda: at.keeper.problem is None)
        assert at.registry.calls.count("register") == 1, "it never lost its lease"


async def test_answers_that_come_in_another_order_tell_no_departure_twice() -> None:
    registry = ScriptedRegistry(departed=[8], held_up=asyncio.Event())
    async with keeping(registry) as at:
        await until(lambda: at.registry.calls.count("renew") == 1)
        first, registry.held_up = registry.held_up, None
        registry.departed = [8, 9]
        await until(lambda: at.departed == [[8, 9]])
        assert first is not None
        first.set()
        renewed = at.renewals
        await until(lambda: at.renewals >= renewed + 4)
        assert at.departed == [[8, 9]]


async def test_a_worker_that_was_declared_gone_renews_and_registers_no_more() -> None:
    async with keeping(ScriptedRegistry()) as at:
        await until(lambda: at.renewals >= 1)
        at.registry.refusals = [DeclaredGone("incarnation 5 was declared gone: restart the worker")] * 2
        at.registry.known = False
        assert at.running is not None
        with pytest.raises(DeclaredGone, match="incarnation 5"):
            await at.running
        assert at.registry.calls.count("register") == 2


async def test_a_worker_that_has_left_is_silent_and_does_not_mind_that_it_is_gone() -> None:
    async with keeping(ScriptedRegistry()) as at:
        await until(lambda: at.renewals == at.registry.calls.count("renew") >= 1)  # none is on its way
        await at.keeper.leave()
        at.registry.refusals, at.registry.known = [DeclaredGone("it has left")], False
        assert at.running is not None
        await asyncio.wait_for(at.running, PATIENCE_S)
        assert at.registry.calls[-1] == "leave"


async def test_honest_health_a_renewal_says_for_how_long_a_turn_has_not_ended() -> None:
    async with keeping(ScriptedRegistry()) as at:
        await until(lambda: at.renewals >= 3)
        assert set(at.registry.turns_ms) == {0}
        at.turns = itertools.repeat(7)
        await until(lambda: at.registry.turns_ms[-1] >= 150)
        at.turns = itertools.count(8)
        await until(lambda: at.registry.turns_ms[-1] == 0)


def test_a_turn_is_not_held_against_a_worker_for_time_that_nobody_watched() -> None:
    turn = 1
    stall = Stall(lambda: turn)
    assert [stall.look_ms(now_s, 2.0) for now_s in (10.0, 11.0, 12.5)] == [0, 1000, 2500]
    assert stall.look_ms(100.0, 2.0) == 4500, "the watcher itself stood still"
    turn = 2
    assert [stall.look_ms(now_s, 2.0) for now_s in (101.0, 101.5)] == [0, 500]
