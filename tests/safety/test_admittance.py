"""Tests of which certificate may call which gRPC method."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.decode.settings import DecodeSettings
from baton.ids import Incarnation, Opener, RoomId
from baton.rooms.phases import Side
from baton.rooms.timeline import Moment
from baton.runtime.errors import StartupError
from baton.runtime.file_changes import LOOK_S
from baton.runtime.settings import load
from baton.runtime.tls_files import TlsFiles
from baton.wire.baton.v1 import (
    bootstraps_pb2,
    bootstraps_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    rooms_pb2,
    rooms_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from baton.wire.channel import Channels, Server, open_channel
from baton.wire.conversions import side_to_wire
from baton.wire.errors import remote_error
from baton.wire.method_authorization import ALLOWED_CALLERS, OURS
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from baton.worker.lifecycle.follower_host import FollowerHost
from tests.safety.certificates import made, of

CALL_S: Final = 20.0
FILES: Final = (bootstraps_pb2, workers_pb2, rooms_pb2, inference_pb2)
SERVICES: Final = [each for file in FILES for each in file.DESCRIPTOR.services_by_name.values()]
METHODS: Final = [method for service in SERVICES for method in service.methods]
ADDERS: Final[list[tuple[type[Any], Callable[..., None]]]] = [
    (
        bootstraps_pb2_grpc.BootstrapServiceServicer,
        bootstraps_pb2_grpc.add_BootstrapServiceServicer_to_server,
    ),
    (workers_pb2_grpc.WorkerRegistryServicer, workers_pb2_grpc.add_WorkerRegistryServicer_to_server),
    (workers_pb2_grpc.PresenceServiceServicer, workers_pb2_grpc.add_PresenceServiceServicer_to_server),
    (workers_pb2_grpc.KvEventServiceServicer, workers_pb2_grpc.add_KvEventServiceServicer_to_server),
    (rooms_pb2_grpc.RoomServiceServicer, rooms_pb2_grpc.add_RoomServiceServicer_to_server),
    (inference_pb2_grpc.PrefillServiceServicer, inference_pb2_grpc.add_PrefillServiceServicer_to_server),
    (inference_pb2_grpc.DecodeServiceServicer, inference_pb2_grpc.add_DecodeServiceServicer_to_server),
    (inference_pb2_grpc.HandoverServiceServicer, inference_pb2_grpc.add_HandoverServiceServicer_to_server),
]


def answers(cls: type[Any], served: list[str]) -> Any:
    """A servicer of every method, which notes what it was asked. What it is asked here is empty."""

    def method(descriptor: MethodDescriptor) -> Any:
        reply = message_factory.GetMessageClass(descriptor.output_type)

        async def one(_self: Any, _request: Any, _context: Any) -> Any:
            served.append(descriptor.full_name)
            return reply()

        async def many(_self: Any, _request: Any, _context: Any) -> AsyncIterator[Any]:
            served.append(descriptor.full_name)
            yield reply()

        return many if descriptor.server_streaming else one

    name = cls.__name__.removesuffix("Servicer")
    service = next(each for each in SERVICES if each.name == name)
    return type(f"Answering{name}", (cls,), {each.name: method(each) for each in service.methods})()


@asynccontextmanager
async def serving(files: TlsFiles, port: int = 0) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve every service of every party on one server. Yields its address and what it served."""
    served: list[str] = []
    server = Server(Identity(files))
    for cls, add in ADDERS:
        add(answers(cls, served), server.grpc)
    address = f"127.0.0.1:{server.bind('127.0.0.1', port)}"
    await server.start(())
    try:
        yield address, served
    finally:
        await server.stop(0)


def request_of(method: MethodDescriptor, party: ServiceRole) -> Any:
    """Return a request that `party` would send."""
    request = message_factory.GetMessageClass(method.input_type)()
    if isinstance(request, workers_pb2.RegisterRequest):
        request.side = side_to_wire(Side.DECODE if party is ServiceRole.DECODE else Side.PREFILL)
    if isinstance(request, rooms_pb2.ReportRoomsRequest) and party is not ServiceRole.BOOTSTRAP:
        request.incarnation = 7
    return request


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, request: Any) -> str:
    """Return how a call ended: OK, or its status. A stream is only opened: a message under way at its end
    would be an error of the client library."""
    reply = message_factory.GetMessageClass(method.output_type)
    path = f"/{method.containing_service.full_name}/{method.name}"
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    make = kinds[method.client_streaming, method.server_streaming]
    begin = make(path, lambda each: each.SerializeToString(), reply.FromString)
    asked = begin(timeout=CALL_S) if method.client_streaming else begin(request, timeout=CALL_S)
    try:
        if method.server_streaming:
            async for _ in asked:
                pass
        else:
            await asked
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    finally:
        asked.cancel()
    return "OK"


def test_every_method_of_the_contract_is_somebodys() -> None:
    named = {f"/{each.containing_service.full_name}/{each.name}".removeprefix(OURS) for each in METHODS}
    assert named == set(ALLOWED_CALLERS)


async def test_each_party_calls_what_is_its_own_and_nothing_else(ours: Path) -> None:
    async with serving(of(ours, "bootstrap")) as (address, served):
        for party in ServiceRole:
            channel = open_channel(address, ServiceRole.BOOTSTRAP, Identity(of(ours, party)))
            ended = {
                f"{each.containing_service.name}/{each.name}": await call(
                    channel, each, request_of(each, party)
                )
                for each in METHODS
            }
            await channel.close()
            assert ended == {
                name: "OK" if party in allowed else "PERMISSION_DENIED"
                for name, allowed in ALLOWED_CALLERS.items()
            }
            allowed = {name for name, parties in ALLOWED_CALLERS.items() if party in parties}
            assert {name.removeprefix("baton.v1.").replace(".", "/") for name in served} == allowed
            served.clear()


async def test_a_worker_registers_for_its_own_side_and_reports_as_itself(ours: Path) -> None:
    async with serving(of(ours, "bootstrap")) as (address, served):
        channel = open_channel(address, ServiceRole.BOOTSTRAP, Identity(of(ours, "prefill")))
        other = workers_pb2.RegisterRequest(side=side_to_wire(Side.DECODE))
        outcome = rooms_pb2.RoomReport(room=1, outcome=rooms_pb2.Outcome())
        asked = [
            workers_pb2_grpc.WorkerRegistryStub(channel).Register(other, timeout=CALL_S),
            rooms_pb2_grpc.RoomServiceStub(channel).ReportRooms(
                rooms_pb2.ReportRoomsRequest(reports=[outcome]), timeout=CALL_S
            ),
        ]
        for each in asked:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await each
            assert remote_error(refused.value).kind == "NotAdmitted"
        await channel.close()
        assert served == []


async def test_whoever_has_no_certificate_of_the_authority_gets_no_connection(
    ours: Path, strangers: Path
) -> None:
    ca = (ours / "ca.crt").read_bytes()
    believed = ("grpc.ssl_target_name_override", ServiceRole.PREFILL.tls_name)
    http = (ours / "http.key").read_bytes(), (ours / "http.crt").read_bytes()
    foreign = (strangers / "decode.key").read_bytes(), (strangers / "decode.crt").read_bytes()
    async with serving(of(ours, "prefill")) as (address, served):
        for channel in (
            grpc.aio.insecure_channel(address),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), [believed]),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, *foreign), [believed]),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, *http), [believed]),
        ):
            for method in METHODS:
                assert await call(channel, method, request_of(method, ServiceRole.DECODE)) in (
                    "UNAVAILABLE",
                    "PERMISSION_DENIED",
                )
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=CALL_S
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            await channel.close()
        assert served == []


async def test_a_caller_believes_neither_another_party_nor_another_authority(
    ours: Path, strangers: Path
) -> None:
    method = next(each for each in METHODS if each.name == "Renew")
    mine = Identity(of(ours, "decode"))
    for files in (of(ours, "prefill"), of(strangers, "bootstrap")):
        async with serving(files) as (address, served):
            channel = open_channel(address, ServiceRole.BOOTSTRAP, mine)
            assert await call(channel, method, request_of(method, ServiceRole.DECODE)) == "UNAVAILABLE"
            await channel.close()
            assert served == []


async def test_a_renewed_certificate_is_shown_to_who_connects_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("baton.wire.tls_identity.FileChanges", partial(_changes, now_s))
    before, after = made(tmp_path / "before"), made(tmp_path / "after")
    method = next(each for each in METHODS if each.name == "Renew")
    request = request_of(method, ServiceRole.DECODE)
    live = TlsFiles(tmp_path / "live.crt", tmp_path / "live.key", tmp_path / "ca.crt")

    put(live, before, "bootstrap")
    async with serving(live) as (address, _):
        first = open_channel(address, ServiceRole.BOOTSTRAP, Identity(of(before, "decode")))
        assert await call(first, method, request) == "OK"
        put(live, after, "bootstrap")
        now_s[0] += LOOK_S
        second = open_channel(address, ServiceRole.BOOTSTRAP, Identity(of(after, "decode")))
        assert await call(second, method, request) == "OK"
        assert await call(first, method, request) == "OK", "a connection that is open goes on"
        live.key.write_bytes(b"half a key")
        now_s[0] += LOOK_S
        third = open_channel(address, ServiceRole.BOOTSTRAP, Identity(of(after, "prefill")))
        assert await call(third, method, request) == "OK", "what cannot be used changes nothing"
        for channel in (first, second, third):
            await channel.close()


async def test_a_caller_that_has_to_connect_anew_shows_the_renewed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's certificate was renewed long ago, and the bootstrap is restarted."""
    now_s = [0.0]
    monkeypatch.setattr("baton.wire.tls_identity.FileChanges", partial(_changes, now_s))
    before, after = made(tmp_path / "before"), made(tmp_path / "after")
    live = TlsFiles(tmp_path / "live.crt", tmp_path / "live.key", tmp_path / "ca.crt")
    put(live, before, "decode")
    channels = Channels.showing(Identity(live))
    method = next(each for each in METHODS if each.name == "Renew")
    request = request_of(method, ServiceRole.DECODE)
    async with serving(of(before, "bootstrap")) as (address, _):
        first = channels.to(address, ServiceRole.BOOTSTRAP)
        assert await call(first, method, request) == "OK"
        put(live, after, "decode")
        now_s[0] += LOOK_S
        assert channels.to(address, ServiceRole.BOOTSTRAP) is first, "its connection is still good"
    async with serving(of(after, "bootstrap"), int(address.rpartition(":")[2])):
        async with asyncio.timeout(CALL_S):
            while channels.to(address, ServiceRole.BOOTSTRAP) is first:
                assert await call(first, method, request) == "UNAVAILABLE"
        assert await call(channels.to(address, ServiceRole.BOOTSTRAP), method, request) == "OK"
        assert len(channels) == 1
    await channels.close()


async def test_a_rank_that_does_not_lead_shows_the_renewed_certificate_when_the_bootstrap_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("baton.wire.tls_identity.FileChanges", partial(_changes, now_s))
    monkeypatch.setattr("baton.worker.report_queue.RETRY_S", 0.05)
    before, after = made(tmp_path / "before"), made(tmp_path / "after")
    live = TlsFiles(tmp_path / "live.crt", tmp_path / "live.key", tmp_path / "ca.crt")
    put(live, before, "decode")
    async with serving(of(before, "bootstrap")) as (address, served):
        tls = {"tls_cert": str(live.cert), "tls_key": str(live.key), "tls_ca": str(live.ca)}
        host = FollowerHost(load(DecodeSettings, {"name": "decode-0", "bootstrap": address} | tls, {}))
        host.led_by(Incarnation(7), b"of the ranks")
        host.reporter.use({Opener(1): address}, is_only_one=True)
        host.reporter.report_of_rank(RoomId(1), Moment.LANDED)
        await host.reporter.flush()
        assert len(served) == 1
    put(live, after, "decode")
    now_s[0] += LOOK_S
    async with serving(of(after, "bootstrap"), int(address.rpartition(":")[2])) as (_, served):
        host.reporter.report_of_rank(RoomId(1), Moment.SEALED)
        async with asyncio.timeout(CALL_S):
            while not served:
                await host.reporter.flush()
    assert host.reporter.dropped == 0
    await host.close()


def put(live: TlsFiles, folder: Path, name: str) -> None:
    """Replace the files, as a platform does."""
    beside = live.cert.with_suffix(".new")
    for source, path in ((f"{name}.crt", live.cert), (f"{name}.key", live.key), ("ca.crt", live.ca)):
        assert path is not None
        beside.write_bytes((folder / source).read_bytes())
        beside.replace(path)


def _changes(now_s: list[float], paths: Any) -> Any:
    from baton.runtime.file_changes import FileChanges

    return FileChanges(paths, lambda: now_s[0])


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ("cert", r"--tls-cert .* and --tls-key .* are not a certificate and its unencrypted key"),
        ("key", r"--tls-cert .* and --tls-key .* are not a certificate and its unencrypted key"),
        ("ca", r"--tls-ca .* holds no certificate"),
        ("gone", r"--tls-ca .* cannot be read: No such file"),
        ("another's", r"--tls-cert .* and --tls-key .* are not a certificate and its unencrypted key"),
    ],
)
def test_files_that_cannot_be_used_end_the_start_with_one_line(
    ours: Path, tmp_path: Path, spoilt: str, told: str
) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("-----BEGIN CERTIFICATE-----\nsecret\n-----END CERTIFICATE-----\n")
    good = of(ours, "prefill")
    files = {
        "cert": TlsFiles(nonsense, good.key, good.ca),
        "key": TlsFiles(good.cert, nonsense, good.ca),
        "ca": TlsFiles(good.cert, good.key, nonsense),
        "gone": TlsFiles(good.cert, good.key, tmp_path / "nowhere"),
        "another's": TlsFiles(good.cert, of(ours, "decode").key, good.ca),
    }[spoilt]
    with pytest.raises(StartupError, match=told) as refused:
        Identity(files)
    assert "secret" not in str(refused.value)
    assert "PRIVATE" not in str(refused.value)
