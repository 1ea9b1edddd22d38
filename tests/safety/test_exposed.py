"""Tests of the warning at start about ports that are open to others."""

import logging

import httpx
import pytest
from fastapi import APIRouter, Depends
from prometheus_client import CollectorRegistry

from baton.api.app import create_app, create_pages
from baton.api.http.authentication import operators_only
from baton.bootstrap.listeners import open_listeners
from baton.bootstrap.settings import BootstrapSettings
from baton.decode.settings import DecodeSettings
from baton.ids import Incarnation
from baton.runtime.reachability import is_reachable_from_elsewhere
from baton.runtime.settings import load
from baton.web.closed_connections import ClosedConnections
from baton.wire.worker_credential import draw
from baton.worker.lifecycle.leader_host import WorkerHost
from tests.api import tiny
from tests.api.scripted import ScriptedBackend

KEYS = {"BATON_API_KEYS": "sk-one-0123456789"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_the_loopback_is_this_machines(host: str) -> None:
    assert not is_reachable_from_elsewhere(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "fe80::1%eth0", "node-7.example"])
def test_everything_else_may_be_reached_from_elsewhere(host: str) -> None:
    assert is_reachable_from_elsewhere(host)


@pytest.mark.parametrize(
    ("flags", "environ", "told"),
    [
        ({}, {}, []),
        ({"admin_port": "0"}, {}, []),
        ({"host": "0.0.0.0"}, {}, ["no API keys are set", "plain HTTP", "gRPC is plain"]),
        ({"host": "0.0.0.0"}, KEYS, ["plain HTTP", "gRPC is plain"]),
        ({"host": "0.0.0.0", "grpc_host": "127.0.0.1"}, KEYS, ["plain HTTP"]),
        ({"grpc_host": "0.0.0.0"}, {}, ["gRPC is plain"]),
        ({"admin_port": "0", "admin_host": "0.0.0.0"}, {}, ["the pages for operators are open"]),
    ],
)
def test_the_bootstrap_warns_of_what_others_can_reach(
    flags: dict[str, str], environ: dict[str, str], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    listeners = open_listeners(load(BootstrapSettings, {"http_port": "0", **flags}, environ))
    listeners.close()
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == len(told)
    assert all(words in text for words, text in zip(told, warned, strict=True))


async def test_a_worker_that_registers_where_its_peers_cannot_reach_it_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for bootstrap in ("10.0.0.1:8100", "127.0.0.1:8100"):
        worker = WorkerHost(load(DecodeSettings, {"bootstrap": bootstrap}, {}), Incarnation(7), draw())
        await worker.close()
    (warned,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warned.startswith("nobody on another machine reaches this worker: set --host or --advertise")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_worker_warns_of_a_plain_port_that_others_can_reach(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load(DecodeSettings, {"host": host, "advertise": "127.0.0.1"}, {})
    worker = WorkerHost(settings, Incarnation(7), draw())
    await worker.close()
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [text.partition(":")[0] for text in warned] == (
        [] if host == "127.0.0.1" else ["gRPC is plain and open to whoever reaches it"]
    )


@pytest.mark.parametrize(
    ("flags", "environ", "api", "pages"),
    [
        ({}, {}, 421, 421),
        ({}, KEYS, 401, 421),
        ({"host": "0.0.0.0"}, {}, 404, 421),
        ({"allowed_host": "other.example"}, {}, 421, 421),
        ({"allowed_host": "web.example"}, {}, 404, 404),
        ({"host": "0.0.0.0", "admin_host": "0.0.0.0"}, {}, 404, 404),
        ({"host": "0.0.0.0", "allowed_host": "other.example"}, {}, 421, 421),
        ({"host": "0.0.0.0", "allowed_host": "other.example"}, KEYS, 421, 421),
    ],
)
async def test_a_web_page_of_another_name_reads_nothing_where_nobody_is_asked_for_a_key(
    flags: dict[str, str], environ: dict[str, str], api: int, pages: int
) -> None:
    """A page's domain name was made to point to this server (DNS rebinding). A health probe by address always
    passes."""
    listeners = open_listeners(
        load(BootstrapSettings, {"http_port": "0", "admin_port": "0", **flags}, environ)
    )
    registry = CollectorRegistry()
    app = create_app(ScriptedBackend(), tiny.model(), registry, access_control=listeners.api)
    serving = await listeners.serve(app, lambda: create_pages(app, []), 1, ClosedConnections(registry))
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            for port, status in ((serving.port, api), (serving.admin_port, pages)):
                page = {"Host": f"web.example:{port}"}
                reply = await http.get(f"http://127.0.0.1:{port}/rooms", headers=page)
                assert reply.status_code == status
                assert reply.json()["error"]["message"]
                probe = await http.get(f"http://127.0.0.1:{port}/rooms", headers={"Host": "10.1.2.3:8000"})
                assert probe.status_code in (401, 404)
    finally:
        await serving.stop()


TWO_KEYS = {"BATON_API_KEYS": "sk-one-0123456789,sk-two-0123456789"}
ADMIN_KEYS = {"BATON_ADMIN_API_KEYS": "sk-admin-0123456789"}
ALL, WITHIN = "shared by all callers", "shared within a key"


@pytest.mark.parametrize(
    ("flags", "environ", "api_keys", "prefixes", "pages"),
    [
        ({}, {}, "none", ALL, "whoever reaches the API"),
        ({}, KEYS, "one", ALL, "the API key"),
        ({}, ADMIN_KEYS, "none", ALL, "admin keys"),
        ({}, KEYS | ADMIN_KEYS, "one", ALL, "admin keys"),
        ({}, TWO_KEYS, "several", WITHIN, "nobody: set --admin-api-key-file, --admin-port or --open-admin"),
        ({}, TWO_KEYS | ADMIN_KEYS, "several", WITHIN, "admin keys"),
        ({"open_admin": "true"}, TWO_KEYS, "several", WITHIN, "every API key (--open-admin)"),
        ({"admin_port": "0"}, TWO_KEYS, "several", WITHIN, "whoever reaches --admin-port"),
        ({"admin_port": "0"}, TWO_KEYS | ADMIN_KEYS, "several", WITHIN, "admin keys"),
        (
            {"share_prefix_cache": "true", "open_admin": "true"},
            TWO_KEYS,
            "several",
            "shared by all keys (--share-prefix-cache)",
            "every API key (--open-admin)",
        ),
    ],
)
def test_the_start_logs_who_shares_prefixes_and_who_reads_the_pages_for_operators(
    flags: dict[str, str],
    environ: dict[str, str],
    api_keys: str,
    prefixes: str,
    pages: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    open_listeners(load(BootstrapSettings, {"http_port": "0", **flags}, environ)).close()
    (record,) = [each for each in caplog.records if each.getMessage() == "rights of callers"]
    told = {"api_keys": api_keys, "prefixes": prefixes, "operator_pages": pages}
    assert record.baton_fields == told  # type: ignore[attr-defined]
    assert "sk-" not in caplog.text


@pytest.mark.parametrize(("environ", "status"), [({}, 200), (ADMIN_KEYS, 401)])
async def test_the_port_of_the_pages_asks_for_an_admin_key_if_there_is_one(
    environ: dict[str, str], status: int
) -> None:
    listeners = open_listeners(
        load(BootstrapSettings, {"http_port": "0", "admin_port": "0"}, TWO_KEYS | environ)
    )
    registry = CollectorRegistry()
    router = APIRouter()

    @router.get("/requests", dependencies=[Depends(operators_only)])
    async def requests() -> str:
        return "all"

    app = create_app(ScriptedBackend(), tiny.model(), registry, access_control=listeners.api)
    pages = create_pages(app, [router], listeners.admin)
    serving = await listeners.serve(app, lambda: pages, 1, ClosedConnections(registry))
    try:
        url = f"http://127.0.0.1:{serving.admin_port}/requests"
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(url)).status_code == status
            assert (await http.get(url, headers={"x-api-key": "sk-one-0123456789"})).status_code == status
            assert (await http.get(url, headers={"x-api-key": "sk-admin-0123456789"})).status_code == 200
    finally:
        await serving.stop()
