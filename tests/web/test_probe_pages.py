"""Tests of /metrics, /started, /health and /ready, and of their port when it is taken."""

import asyncio
import os
import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from baton.runtime.cpu_affinity import allowed_cpus, pin
from baton.runtime.errors import StartupError
from baton.runtime.listening_ports import bind_port, port_of
from baton.web.probe_pages import serve_metrics


async def test_the_pages_show_metrics_health_and_readiness() -> None:
    registry = CollectorRegistry()
    Gauge("baton_rooms", "Rooms held.", registry=registry).set(3)
    unstarted = ["no turn yet"]
    unhealthy: list[str] = []
    unready = ["loading the model"]
    server = await serve_metrics(
        bind_port("127.0.0.1", 0, "--metrics-port"),
        registry,
        lambda: unstarted,
        lambda: unhealthy,
        lambda: unready,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as http:
            metrics = await http.get("/metrics")
            assert metrics.headers["content-type"].startswith("text/plain")
            assert "baton_rooms 3.0" in metrics.text
            assert (await http.get("/health")).json() == {"status": "ok"}
            assert (await http.get("/started")).json()["problems"] == ["no turn yet"]
            unstarted.clear()
            assert (await http.get("/started")).status_code == 200
            waiting = await http.get("/ready")
            assert waiting.status_code == 503
            assert waiting.json()["problems"] == ["loading the model"]
            unready.clear()
            assert (await http.get("/ready")).status_code == 200
            unhealthy.append("no turn for 10 s")
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/secrets")).status_code == 404
            assert (await http.post("/metrics")).status_code == 405
    finally:
        await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)


async def test_stopping_twice_is_harmless() -> None:
    server = await serve_metrics(bind_port("127.0.0.1", 0, "--x"), CollectorRegistry(), list, list, list)
    await server.stop()
    await server.stop()


def test_a_busy_port_is_an_error_that_names_port_and_flag() -> None:
    with bind_port("127.0.0.1", 0, "--metrics-port") as taken:
        port = port_of(taken)
        with pytest.raises(StartupError, match=rf"port {port} on 127.0.0.1 is in use.*--metrics-port"):
            bind_port("127.0.0.1", port, "--metrics-port")


def test_a_port_is_free_again_right_after_its_last_user() -> None:
    with bind_port("127.0.0.1", 0, "--x") as first:
        port = port_of(first)
        first.setblocking(True)
        with socket.create_connection(("127.0.0.1", port)), first.accept()[0]:
            pass
    bind_port("127.0.0.1", port, "--x").close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_foreign_host_is_an_error_that_names_the_flag(host: str) -> None:
    with pytest.raises(StartupError, match="--host"):
        bind_port(host, 0, "--metrics-port")


def test_cores_that_are_not_there_are_refused_by_number() -> None:
    with pytest.raises(StartupError, match="--cpus names core 8191"):
        pin((8191,), threads=0)


def test_threads_follow_the_flag_then_the_variable_then_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert pin((), threads=0) == 7
    assert pin((), threads=3) == 3
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert pin((), threads=0) == len(allowed_cpus())
