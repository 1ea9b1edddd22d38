"""Tests that variables meant for other programs do not change what a process does."""

import socket
from typing import Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.runtime.environment_check import FAMILIES, VariableVerdict, clean_environment
from baton.telemetry.otlp_tracer import channel_options
from baton.wire.channel import Server, open_channel
from baton.wire.service_role import ServiceRole

CALL_S: Final = 20.0
SOON_S: Final = 2.0
"""Wait for a call that must not arrive, seconds."""


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Address at which no program listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, url)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    return url


async def answered(channel: grpc.aio.Channel, patience_s: float) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=patience_s)
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close()
    return True


async def test_the_parts_reach_each_other_where_a_proxy_for_http_is_set(dead_proxy: str) -> None:
    server = Server()
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start(())
    try:
        assert not await answered(grpc.aio.insecure_channel(address), SOON_S), "the proxy is not asked at all"
        assert await answered(open_channel(address, ServiceRole.BOOTSTRAP), CALL_S)
        collector = grpc.aio.insecure_channel(address, options=channel_options(f"http://{address}"))
        assert await answered(collector, CALL_S)
    finally:
        await server.stop(0)


def test_a_collector_on_another_host_is_reached_as_the_platform_sets() -> None:
    assert channel_options("http://collector.example:4317") == ()
    assert channel_options("http://[::1]:4317") != ()


def test_what_would_lead_a_part_astray_is_taken_out_and_named() -> None:
    given = {name: "1" for family in FAMILIES for name in family.names}
    dropped = {name for each in FAMILIES if each.verdict is VariableVerdict.DROPPED for name in each.names}
    environ = dict(given)
    assert set(clean_environment(environ)) == dropped
    assert environ.keys() == given.keys() - dropped
    assert clean_environment(environ) == []


def test_what_is_decided_here_does_not_overrule_what_an_operator_asks_of_a_librarys_log() -> None:
    empty: dict[str, str] = {}
    clean_environment(empty)
    assert empty == {"GRPC_VERBOSITY": "NONE", "HF_HUB_OFFLINE": "1"}
    asked: dict[str, str] = {"GRPC_VERBOSITY": "debug", "HF_HUB_OFFLINE": "0"}
    clean_environment(asked)
    assert asked == {"GRPC_VERBOSITY": "debug", "HF_HUB_OFFLINE": "1"}


def test_no_variable_is_judged_twice() -> None:
    names = [name for family in FAMILIES for name in family.names]
    assert len(names) == len(set(names))
