"""Tests that another user of the machine gets nothing of a stack with a run token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.decode.settings import DecodeSettings
from baton.ids import Incarnation
from baton.launch.rank_processes import RankProcesses
from baton.runtime.errors import SettingsError
from baton.runtime.service_settings import ServiceSettings
from baton.runtime.settings import load, settings_of, to_flags
from baton.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc, workers_pb2, workers_pb2_grpc
from baton.wire.channel import Channels, Server, open_channel
from baton.wire.errors import remote_error
from baton.wire.run_token import KEY, TokenChannel
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from baton.wire.worker_credential import draw
from baton.worker.lifecycle.leader_host import WorkerHost
from baton.worker.lifecycle.startup import OWN
from tests.safety.certificates import of
from tests.safety.test_admittance import ADDERS, CALL_S, METHODS, answers, call, request_of
from tests.support.manual_clock import ManualClock

TOKEN: Final = "a-token-of-this-run-0123456789"
OTHERS: Final = (None, TOKEN[:-1], TOKEN + "x", TOKEN.upper())


@asynccontextmanager
async def serving(identity: Identity | None = None) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve every service of every party on one server. Yields its address and what it served."""
    served: list[str] = []
    server = Server(identity, TOKEN)
    for cls, add in ADDERS:
        add(answers(cls, served), server.grpc)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start(())
    try:
        yield address, served
    finally:
        await server.stop(0)


async def status(channel: Any, method: MethodDescriptor) -> str:
    return await call(channel, method, request_of(method, ServiceRole.BOOTSTRAP))


async def test_no_method_is_served_to_a_caller_without_the_token() -> None:
    async with serving() as (address, served):
        for shown in OTHERS:
            channel = open_channel(address, ServiceRole.BOOTSTRAP, run_token=shown or "")
            for method in METHODS:
                assert await status(channel, method) == "UNAUTHENTICATED", (shown, method.full_name)
            await channel.close()
        assert served == []
        channel = open_channel(address, ServiceRole.BOOTSTRAP, run_token=TOKEN)
        for method in METHODS:
            assert await status(channel, method) == "OK", method.full_name
        assert len(served) == len(METHODS)
        await channel.close()


async def test_the_refusal_says_what_to_show() -> None:
    async with serving() as (address, _):
        channel = open_channel(address, ServiceRole.BOOTSTRAP)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rooms_pb2_grpc.RoomServiceStub(channel).ListRooms(
                rooms_pb2.ListRoomsRequest(), timeout=CALL_S
            )
        await channel.close()
    error = remote_error(refused.value)
    assert error.kind == "NotProven"
    assert KEY in str(error)
    assert "BATON_RUN_TOKEN" in str(error)


async def test_platforms_ask_for_health_without_it_and_nobody_for_what_is_served() -> None:
    async with serving() as (address, _):
        channel = open_channel(address, ServiceRole.BOOTSTRAP)
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=CALL_S
        )
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING, "as it began"
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            asked, timeout=CALL_S
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in listing:
                pass
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.close()


async def test_a_certificate_does_not_stand_for_a_token_nor_a_token_for_a_certificate(ours: Path) -> None:
    identity = Identity(of(ours, "bootstrap"))
    renew = next(each for each in METHODS if each.name == "Renew")
    async with serving(Identity(of(ours, "bootstrap"))) as (address, _):
        for shown, token, wanted in (
            (identity, "", "UNAUTHENTICATED"),
            (identity, TOKEN, "PERMISSION_DENIED"),
            (None, TOKEN, "UNAVAILABLE"),
            (Identity(of(ours, "decode")), TOKEN, "OK"),
        ):
            channel = open_channel(address, ServiceRole.BOOTSTRAP, shown, token)
            assert await status(channel, renew) == wanted
            await channel.close()


async def test_a_channel_that_is_not_of_asyncio_shows_it_as_well() -> None:
    async with serving() as (address, _):
        request = workers_pb2.RenewRequest()

        def asked(token: str) -> str:
            with grpc.insecure_channel(address) as plain:
                stub = workers_pb2_grpc.WorkerRegistryStub(TokenChannel(plain, token))
                try:
                    stub.Renew(request, timeout=CALL_S)
                    stub.Renew.future(request, timeout=CALL_S).result()
                except grpc.RpcError as error:
                    return str(error.code().name)
            return "OK"

        assert await asyncio.to_thread(asked, TOKEN) == "OK"
        assert await asyncio.to_thread(asked, TOKEN[1:]) == "UNAUTHENTICATED"


async def test_a_worker_asks_for_the_token_that_it_was_given_and_shows_it() -> None:
    async with serving() as (address, served):
        environ = {"BATON_RUN_TOKEN": TOKEN}
        host = WorkerHost(load(DecodeSettings, {"bootstrap": address}, environ), Incarnation(7), draw())
        await host.server.start(())
        try:
            bootstrap = host.channels.to(address, ServiceRole.BOOTSTRAP)
            await rooms_pb2_grpc.RoomServiceStub(bootstrap).ReportRooms(
                rooms_pb2.ReportRoomsRequest(), timeout=CALL_S
            )
            assert served == ["baton.v1.RoomService.ReportRooms"]
            for token, found in (("", "UNAUTHENTICATED"), (TOKEN, "OK")):
                channels = Channels.showing(None, token)
                who = next(each for each in METHODS if each.name == "WhoIsThere")
                own = channels.to(f"127.0.0.1:{host.port}", ServiceRole.DECODE)
                assert await call(own, who, workers_pb2.WhoIsThereRequest()) == found
                await channels.close()
        finally:
            await host.close()


def test_the_token_is_given_on_by_the_environment_alone_and_told_to_no_other_rank() -> None:
    settings = load(DecodeSettings, {"tp": "2"}, {"BATON_RUN_TOKEN": TOKEN})

    async def nobody(name: str, pid: int, secret: bytes) -> None: ...

    group = RankProcesses(settings, {"BATON_RUN_TOKEN": "another", "PATH": "/bin"}, nobody, ManualClock())
    assert group._environ == {"PATH": "/bin", "BATON_RUN_TOKEN": TOKEN}
    assert TOKEN not in " ".join(to_flags(settings))
    assert TOKEN not in repr(settings)
    assert {each.name for each in settings_of(ServiceSettings) if each.secret} <= OWN


@pytest.mark.parametrize(
    "text", ["", "short", "x" * 513, "with a space in the middle", "tab\there-0123456789"]
)
def test_what_is_no_token_is_refused_unquoted(text: str) -> None:
    with pytest.raises(SettingsError, match="BATON_RUN_TOKEN") as refused:
        load(DecodeSettings, {}, {"BATON_RUN_TOKEN": text})
    assert not text or text not in str(refused.value)
