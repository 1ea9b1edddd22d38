"""Tests of a worker's processes when their group breaks, and when they are told to stop."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.ids import Incarnation
from baton.parallel.rank_group import GroupBroken
from baton.prefill.settings import PrefillSettings
from baton.rooms.errors import Cause, DeclaredGone, Reason
from baton.runtime.clock import SystemClock
from baton.runtime.errors import GroupLost, ReportedGone, StartupError
from baton.runtime.settings import load
from baton.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc, workers_pb2, workers_pb2_grpc
from baton.wire.conversions import outcome_from_wire, outcome_to_wire
from baton.wire.errors import Draining
from baton.wire.worker_credential import draw
from baton.worker.lifecycle import follower_host, leader_host
from baton.worker.lifecycle.follower_host import FollowerHost
from baton.worker.lifecycle.leader_host import Role, WorkerHost
from baton.worker.turn_loop import TurnProgress
from tests.patience import PATIENCE_S
from tests.wire.servers import channel_to, serving, until
from tests.worker.test_lease_keeper import ScriptedRegistry

WHY = "turn 7: rank 2 has gone (connection closed)"


class Ended(BaseException):
    """Raised in place of the end of the process."""


@pytest.fixture(autouse=True)
def ended_with(monkeypatch: pytest.MonkeyPatch) -> list[StartupError]:
    """Errors that the process ended with."""
    found: list[StartupError] = []

    def end(error: StartupError) -> NoReturn:
        found.append(error)
        raise Ended

    monkeypatch.setattr(leader_host, "end_now", end)
    monkeypatch.setattr(follower_host, "end_now", end)
    return found


@dataclass
class Streams(inference_pb2_grpc.PrefillServiceServicer):
    """A service with one open stream, which ends with the cause that the worker is told to report."""

    outcomes: asyncio.Queue[Cause] = field(default_factory=asyncio.Queue)

    async def RunRoom(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[inference_pb2.RunRoomReply]:
        yield inference_pb2.RunRoomReply(accepted=inference_pb2.Accepted())
        yield inference_pb2.RunRoomReply(outcome=outcome_to_wire(await self.outcomes.get()))

    async def RunRooms(  # noqa: N802
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[inference_pb2.RunRoomsReply]:
        raise NotImplementedError
        yield


@dataclass
class Leader:
    """The leader's process, registered and turning, until its group breaks."""

    host: WorkerHost
    registry: ScriptedRegistry
    streams: Streams
    broke: asyncio.Event
    said: list[list[str]]
    """Calls to the bootstrap so far and the problem on /ready, at each moment at which the streams were
    told."""
    serving: asyncio.Task[int]
    shutdown: asyncio.Event


@asynccontextmanager
async def leading(
    registry: ScriptedRegistry | None = None, ended_by: type[Exception] = GroupBroken
) -> AsyncIterator[Leader]:
    registry, streams, broke = registry or ScriptedRegistry(), Streams(), asyncio.Event()
    said: list[list[str]] = []
    add = partial(workers_pb2_grpc.add_WorkerRegistryServicer_to_server, registry)
    async with serving(add) as at:
        settings = load(PrefillSettings, {"name": "prefill-0", "bootstrap": at}, {})
        host = WorkerHost(settings, Incarnation(7), draw())
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(streams, host.server.grpc)
        await host.start_pages(CollectorRegistry(), TurnProgress(SystemClock()))

        async def turns() -> None:
            await broke.wait()
            raise ended_by(WHY)

        def break_off(cause: Cause) -> None:
            said.append([*registry.calls, str(host.problem)])
            streams.outcomes.put_nowait(cause)

        registration = workers_pb2.RegisterRequest()
        role = Role(registration, (), turns(), lambda _: None, (GroupBroken,), break_off)
        shutdown = asyncio.Event()
        task = asyncio.create_task(host.serve(role, shutdown))
        try:
            await until(lambda: registry.unproven or host.problem is None)
            yield Leader(host, registry, streams, broke, said, task, shutdown)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await host.close()


async def last_word(leader: Leader) -> Cause | None:
    """Return the cause that an open stream is told when the turns end."""
    async with channel_to(f"127.0.0.1:{leader.host.port}") as channel, asyncio.timeout(PATIENCE_S):
        call = inference_pb2_grpc.PrefillServiceStub(channel).RunRoom(inference_pb2.RunRoomRequest())
        replies = aiter(call)
        assert (await anext(replies)).HasField("accepted")
        leader.broke.set()
        return outcome_from_wire((await anext(replies)).outcome)


async def test_the_leader_of_a_broken_group_tells_the_bootstrap_then_its_streams_why_and_ends(
    ended_with: list[StartupError],
) -> None:
    async with leading() as leader:
        cause = await last_word(leader)
        with pytest.raises(Ended):
            await asyncio.wait_for(leader.serving, PATIENCE_S)
    text = f"prefill worker prefill-0: {WHY}"
    assert cause == Cause(Reason.GROUP_BROKEN, text)
    [seen] = leader.said
    assert seen[-2:] == ["drain", f"prefill-0: {WHY}"]
    [error] = ended_with
    assert isinstance(error, GroupLost)
    assert str(error) == f"prefill-0: {WHY}"


async def test_a_worker_whose_turns_end_by_anything_else_tells_its_streams_why(
    ended_with: list[StartupError],
) -> None:
    async with leading(ended_by=RuntimeError) as leader:
        cause = await last_word(leader)
        with pytest.raises(RuntimeError, match=WHY[:20]):
            await asyncio.wait_for(leader.serving, PATIENCE_S)
    text = f"prefill worker prefill-0 ends: {WHY}"
    assert cause == Cause(Reason.PREFILL_LOST, text)
    [seen] = leader.said
    assert seen[-2:] == ["drain", f"prefill-0 ends: {WHY}"]
    assert not ended_with


async def test_a_worker_that_was_declared_gone_while_it_lives_tells_its_streams_why_and_ends(
    ended_with: list[StartupError],
) -> None:
    """Its peers may have reused the memory that it writes to. So it stops its turns before anything else."""
    async with leading() as leader:
        async with channel_to(f"127.0.0.1:{leader.host.port}") as channel, asyncio.timeout(PATIENCE_S):
            call = inference_pb2_grpc.PrefillServiceStub(channel).RunRoom(inference_pb2.RunRoomRequest())
            replies = aiter(call)
            assert (await anext(replies)).HasField("accepted")
            leader.registry.refusals = [DeclaredGone("incarnation 7 was declared gone")]
            leader.registry.known = False
            cause = outcome_from_wire((await anext(replies)).outcome)
        with pytest.raises(Ended):
            await asyncio.wait_for(leader.serving, PATIENCE_S)
    text = "prefill worker prefill-0 was declared gone while it lives"
    assert cause == Cause(Reason.PREFILL_LOST, text)
    [error] = ended_with
    assert isinstance(error, ReportedGone)
    assert str(error).startswith("prefill-0 was declared gone while it lives: somebody reported its exit")


async def test_a_worker_that_drains_ends_as_well_when_it_was_declared_gone(
    ended_with: list[StartupError],
) -> None:
    async with leading() as leader:
        leader.shutdown.set()
        await until(lambda: "drain" in leader.registry.calls)
        leader.registry.refusals = [DeclaredGone("incarnation 7 was declared gone")]
        leader.registry.known = False
        with pytest.raises(Ended):
            await asyncio.wait_for(leader.serving, PATIENCE_S)
    assert [type(error) for error in ended_with] == [ReportedGone]


async def test_ack_is_proof_a_worker_whose_turns_fail_as_it_flushes_says_no_goodbye() -> None:
    """A rank that still writes may be what stopped the turns."""
    said: list[str] = []
    fail = asyncio.Event()

    async def turns() -> None:
        await fail.wait()
        raise GroupBroken(WHY)

    class Lease:
        async def drain(self) -> int:
            return 0

        async def leave(self) -> None:
            said.append("goodbye")

    class Reports:
        async def flush(self) -> None:
            fail.set()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(turns())
    mailbox: Any = SimpleNamespace(put=lambda _: None)
    lease: Any = Lease()
    reports: Any = Reports()
    with pytest.raises(GroupBroken):
        await leader_host.drain(lease, task, mailbox, reports, timeout_ms=10)
    assert not said


async def test_a_worker_is_ready_when_a_canary_hand_over_has_passed_through_it() -> None:
    async with leading(ScriptedRegistry(unproven=True)) as leader:
        await until(lambda: leader.host.problem == "no canary hand-over has passed through it yet")
        leader.registry.unproven = False
        await until(lambda: leader.host.problem is None)


async def test_who_waits_for_a_turn_of_a_broken_group_is_told_and_need_not_wait() -> None:
    async with leading() as leader:
        asked = asyncio.create_task(
            leader.host.mailbox.submit(group_pb2.Command(run=inference_pb2.RunRoomRequest()))
        )
        await asyncio.sleep(0)
        leader.broke.set()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(Draining, match="rank 2 has gone"):
                await asked


async def test_a_stream_that_does_not_end_holds_the_end_up_no_longer_than_a_moment() -> None:
    async with leading() as leader, channel_to(f"127.0.0.1:{leader.host.port}") as channel:
        stub = inference_pb2_grpc.PrefillServiceStub(channel)
        calls = [stub.RunRoom(inference_pb2.RunRoomRequest()) for _ in range(2)]
        for call in calls:
            await anext(aiter(call))
        leader.broke.set()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(Ended):
                await leader.serving


@asynccontextmanager
async def following() -> AsyncIterator[tuple[FollowerHost, asyncio.Event]]:
    settings = load(PrefillSettings, {"name": "prefill-0"}, {})
    host, shutdown = FollowerHost(settings), asyncio.Event()
    await host.start_pages(CollectorRegistry(), TurnProgress(SystemClock()))
    try:
        yield host, shutdown
    finally:
        await host.close()


async def test_a_follower_leaves_the_first_signal_to_the_leader(caplog: pytest.LogCaptureFixture) -> None:
    leave = asyncio.Event()

    async def turns() -> None:
        await leave.wait()

    async with following() as (host, shutdown):
        with caplog.at_level(logging.WARNING):
            serve = asyncio.create_task(host.serve(turns(), (GroupBroken,), shutdown))
            shutdown.set()
            await until(lambda: "the leader decides" in caplog.text)
        assert not serve.done()
        leave.set()
        assert await serve == 0


async def test_a_follower_of_a_broken_group_ends_with_why(ended_with: list[StartupError]) -> None:
    async def turns() -> None:
        raise GroupBroken(WHY)

    async with following() as (host, shutdown):
        with pytest.raises(Ended):
            await host.serve(turns(), (GroupBroken,), shutdown)
    assert [str(error) for error in ended_with] == [f"prefill-0: {WHY}"]


async def test_a_follower_answers_the_platform_on_pages_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    leave = asyncio.Event()

    async def turns() -> None:
        await leave.wait()

    with caplog.at_level(logging.INFO):
        async with following() as (host, shutdown):
            [said] = [each for each in caplog.records if each.msg == "listening"]
            port = vars(said)["baton_fields"]["metrics_port"]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
                assert (await http.get("/ready")).json()["problems"] == ["still starting"]
                serve = asyncio.create_task(host.serve(turns(), (GroupBroken,), shutdown))
                await asyncio.sleep(0)
                assert (await http.get("/ready")).status_code == 200
            leave.set()
            await serve
