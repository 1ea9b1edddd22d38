"""Tests that the HTTP server does what its clients expect of connections."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

import pytest
import uvicorn
import uvloop
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from uvicorn.server import ServerState

from baton.bootstrap.settings import BootstrapSettings
from baton.runtime.listening_ports import bind_port
from baton.runtime.tls_files import TlsFiles
from baton.web import http_server
from baton.web.bounded_http import READ_BYTES_MIN, BoundedHttp
from baton.web.http_server import KEEP_ALIVE_S, serve_http

CLIENTS_KEEP_S: Final = 5.0
"""Time for which httpx, and so the OpenAI client, keeps an idle connection, seconds."""
REQUEST: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_a_connection_that_rested_as_long_as_clients_keep_one_still_serves() -> None:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "ok"

    server = await serve_http(app, bind_port("127.0.0.1", 0, "--port"), 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for rest_s in (CLIENTS_KEEP_S + 1, 0):
            writer.write(REQUEST)
            async with asyncio.timeout(10):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                await reader.readuntil(b'"ok"')
            await asyncio.sleep(rest_s)
    finally:
        writer.close()
        await server.stop()


async def test_a_connection_rests_as_long_as_is_set() -> None:
    server = await serve_http(FastAPI(), bind_port("127.0.0.1", 0, "--port"), 1, keep_alive_s=0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(20):
            writer.write(REQUEST)
            assert (await reader.readline()).startswith(b"HTTP/1.1 404")
            await reader.read()
    finally:
        writer.close()
        await server.stop()


def test_a_connection_rests_longer_than_proxies_keep_theirs() -> None:
    assert KEEP_ALIVE_S > 90
    assert BootstrapSettings().http_keep_alive_ms == KEEP_ALIVE_S * 1000


MUCH: Final = 16 * 2**20
"""Bytes, more than the system takes for a client that reads nothing."""
LOOPS: Final = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


async def unread(
    *, until_hung_up_on: bool, tls: TlsFiles | None = None, believed: ssl.SSLContext | None = None
) -> None:
    """Start a client that asks for much and reads nothing, and then stop the server."""
    app = FastAPI()
    answered = asyncio.Event()

    @app.get("/health")
    async def health() -> PlainTextResponse:
        answered.set()
        return PlainTextResponse("x" * MUCH)

    async with asyncio.timeout(20):
        server = await serve_http(app, bind_port("127.0.0.1", 0, "--port"), 3600, tls)
        connections = server.connections

        def ask() -> socket.socket:
            client = socket.create_connection(("127.0.0.1", server.port))
            if believed is not None:
                client = believed.wrap_socket(client, server_hostname="localhost")
            client.sendall(REQUEST)
            return client

        with await asyncio.to_thread(ask):
            await answered.wait()
            while until_hung_up_on and connections:
                await asyncio.sleep(0.001)
            await server.stop()
            assert not connections


@LOOPS
def test_the_connection_of_a_client_that_reads_nothing_is_closed(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttp, "stalled_s", 0.1)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(unread(until_hung_up_on=True))


@LOOPS
def test_a_client_that_reads_nothing_does_not_use_up_the_servers_grace(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "STALLED_AT_END_S", 0.1)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(unread(until_hung_up_on=False))


class Pipe:
    """A transport, with the clock of its loop."""

    def __init__(self) -> None:
        self.unread, self.now_s = 0, 0.0
        self.closing = self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def set_write_buffer_limits(self, _: int) -> None:
        pass

    def get_extra_info(self, _: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True

    def time(self) -> float:
        return self.now_s

    def call_later(self, *_: Any) -> asyncio.TimerHandle | None:
        return None


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("rest", [0, READ_BYTES_MIN - 1], ids=["nothing", "next to nothing"])
def test_a_slow_client_is_not_closed_until_it_reads_nothing(closing: bool, rest: int) -> None:
    pipe = Pipe()
    config = uvicorn.Config(FastAPI(), log_config=None)
    connection = BoundedHttp(config, ServerState(), {}, cast(Any, pipe))
    connection.connection_made(cast(Any, pipe))
    pipe.unread, pipe.closing = 1_000_000, closing
    if not closing:
        connection.pause_writing()
    for _ in range(100):
        connection.end_if_stalled(60.0)
        pipe.now_s += 59.0
        connection.end_if_stalled(60.0)
        pipe.unread -= READ_BYTES_MIN
    connection.end_if_stalled(60.0)
    pipe.now_s += 59.0
    connection.end_if_stalled(60.0)
    assert not pipe.aborted
    pipe.unread -= rest
    pipe.now_s += 1.0
    connection.end_if_stalled(60.0)
    assert pipe.aborted


def test_a_client_that_has_read_everything_gets_a_new_time_limit() -> None:
    pipe = Pipe()
    connection = BoundedHttp(uvicorn.Config(FastAPI(), log_config=None), ServerState(), {}, cast(Any, pipe))
    connection.connection_made(cast(Any, pipe))
    pipe.unread = 100_000
    for _ in range(100):
        connection.pause_writing()
        connection.end_if_stalled(60.0)
        connection.resume_writing()
        pipe.now_s += 59.0
    for _ in range(100):
        connection.end_if_stalled(60.0)
        pipe.now_s += 59.0
    assert not pipe.aborted
