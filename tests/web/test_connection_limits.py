"""Tests that connections are bounded together, and that no address shuts another out."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from baton.api.app import create_app
from baton.api.http.authentication import AccessControl
from baton.runtime.listening_ports import bind_port
from baton.runtime.tls_files import TlsFiles
from baton.web import connection_limits
from baton.web.api_keys import ApiKeys
from baton.web.bounded_http import PIPELINED_MAX, BoundedHttp
from baton.web.closed_connections import LIMIT, ClosedConnections
from baton.web.connection_limits import ConnectionEntry, ConnectionLimits
from baton.web.http_server import HttpServer, serve_http
from tests.api import tiny
from tests.api.scripted import ScriptedBackend
from tests.safety.certificates import made

KEY: Final = "sk-one-0123456789"
PATIENCE_S: Final = 20.0
GET: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST: Final = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
KEYED: Final = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
BODY_BYTES: Final = 60_000
MUCH: Final = b"x" * 16 * 2**20
"""Bytes, more than the system takes for a client that reads nothing."""
STALLS: Final = b"Content-Length: 65000\r\n\r\n" + b" " * BODY_BYTES


# ---- the limits alone


class Clock:
    """Clock in seconds that advances by one at each reading."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", Clock())


class Port:
    """Limits of 10 connections and 100 bytes, with the connections that were closed."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.limits = ConnectionLimits(
            ClosedConnections(self.registry), connections_max=10, total_bytes_max=100
        )
        self.closed: list[str] = []

    def connect(self, name: str, address: str, *, answering: bool = False) -> ConnectionEntry | None:
        entry = self.limits.admit((address, 1))
        if entry is not None:
            entry.close = lambda: self.closed.append(name)
            entry.can_close = lambda: not answering
        return entry

    @property
    def counted(self) -> float | None:
        return self.registry.get_sample_value("baton_http_connections_hung_up_total", {"why": LIMIT})


@pytest.mark.usefixtures("_clock")
def test_the_address_with_most_connections_makes_room_by_the_one_that_rested_longest() -> None:
    port = Port()
    entries = [port.connect(f"a{at}", "10.0.0.1") for at in range(8)]
    port.connect("b0", "10.0.0.2")
    port.connect("b1", "10.0.0.2")
    assert entries[0] is not None
    entries[0].move()
    assert port.connect("c0", "10.0.0.3") is not None
    assert port.closed == ["a1"]
    assert port.counted == 1


@pytest.mark.usefixtures("_clock")
def test_a_connection_with_a_running_answer_is_not_closed_for_others() -> None:
    port = Port()
    for at in range(10):
        port.connect(f"a{at}", "10.0.0.1", answering=at != 7)
    assert port.connect("b0", "10.0.0.2") is not None
    assert port.closed == ["a7"]
    assert port.connect("b1", "10.0.0.2") is not None, "a newcomer that waits makes room for the next"
    assert port.closed == ["a7", "b0"]


@pytest.mark.usefixtures("_clock")
def test_bytes_are_bounded_over_all_connections() -> None:
    port = Port()
    entries = [port.connect(f"a{at}", "10.0.0.1") for at in range(5)]
    small = port.connect("b0", "10.0.0.2")
    assert small is not None
    small.hold(10)
    for entry in entries:
        assert entry is not None
        entry.hold(30)
    assert port.closed[:1] == ["a0"]
    assert "b0" not in port.closed
    assert port.limits.total_bytes <= 100
    small.leave()
    small.leave()
    small.hold(50)
    assert port.limits.total_bytes <= 100


@pytest.mark.usefixtures("_clock")
def test_a_search_that_closes_nothing_is_not_repeated_for_every_byte() -> None:
    port, looks = Port(), [0]

    def is_answered() -> bool:
        looks[0] += 1
        return False

    entries = [entry for at in range(10) if (entry := port.connect(f"a{at}", f"10.0.0.{at}")) is not None]
    for entry in entries:
        entry.can_close = is_answered
        entry.hold(10)
    for size in range(11, 31):
        entries[0].hold(size)
    assert port.closed == []
    assert 0 < looks[0] <= 4 * len(entries), "at each sixteenth more, of a hundred bytes"
    entries[1].can_close = lambda: True
    entries[0].hold(60)
    assert port.closed == ["a1"]


def test_an_ipv6_network_is_one_address() -> None:
    limits = ConnectionLimits(ClosedConnections(CollectorRegistry()))
    networks = {
        entry.network
        for address in ("2001:db8::1", "2001:db8::2", "2001:db8:1::1")
        if (entry := limits.admit((address, 1, 0, 0))) is not None
    }
    assert len(networks) == 2
    assert limits.admit("") is not None, "a socket without an address"


# ---- real connections


@dataclass
class Served:
    server: HttpServer
    registry: CollectorRegistry
    backend: ScriptedBackend
    clients: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self, sent: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        self.clients.append(writer)
        writer.write(sent)
        return reader

    async def status(self, sent: bytes) -> str:
        """Return the status of the answer on a connection of its own, or an empty text if it was closed."""
        reader = await self.connect(sent)
        try:
            return (await reader.readline())[9:12].decode()
        except ConnectionError:
            return ""

    async def statuses(self, sent: bytes) -> Counter[str]:
        """Return the statuses of all answers until the server closes the connection."""
        reader = await self.connect(sent)
        return Counter(status.decode() for status in re.findall(rb"HTTP/1.1 (\d+)", await reader.read()))

    @property
    def connections(self) -> list[BoundedHttp]:
        return self.server.connections

    @property
    def limits(self) -> ConnectionLimits:
        return self.server.limits

    @property
    def closed(self) -> float:
        value = self.registry.get_sample_value("baton_http_connections_hung_up_total", {"why": LIMIT})
        return value or 0.0


@asynccontextmanager
async def serving(files: TlsFiles | None = None, *, keys: bool = False, **how: Any) -> AsyncIterator[Served]:
    registry, router, backend = CollectorRegistry(), APIRouter(), ScriptedBackend()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/small")
    async def small() -> Response:
        return Response(MUCH[: 60 * 2**10])

    @router.get("/much")
    async def much() -> Response:
        return Response(MUCH)

    access_control = AccessControl(ApiKeys([KEY], None)) if keys else None
    app = create_app(backend, tiny.model(), registry, routers=[router], access_control=access_control)
    sock = bind_port("127.0.0.1", 0, "test")
    server = await serve_http(
        app, sock, 1, files, answers_refusals=True, connections=ClosedConnections(registry), **how
    )
    served = Served(server, registry, backend)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield served
    finally:
        for client in served.clients:
            client.transport.abort()
        await server.stop()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "linger_s", 0.1)


@pytest.mark.parametrize(
    "sent", [b"", GET + b"\r\n", GET, POST + STALLS], ids=["nothing", "idle", "half a head", "half a body"]
)
async def test_connections_that_wait_for_their_clients_make_room(sent: bytes) -> None:
    async with serving(connections_max=20) as served:
        for _ in range(60):
            await served.connect(sent)
        await until(lambda: served.closed >= 40)
        assert await served.status(GET + b"\r\n") == "200"
        assert len(served.limits) <= 20
        await until(lambda: len(served.connections) <= 20)


async def test_an_answer_that_is_computed_is_not_cut_for_a_new_connection() -> None:
    go_on = asyncio.Event()
    body = b'{"model": "%b", "prompt": "x"}' % tiny.MODEL.encode()
    asked = POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
    async with serving(connections_max=5) as served:
        script = served.backend.script
        served.backend.script = lambda request: [go_on, *script(request)]  # type: ignore[misc]
        answers = [asyncio.create_task(served.status(asked)) for _ in range(5)]
        await until(lambda: len(served.backend.streams) == 5)
        assert await served.status(GET + b"\r\n") == "", "there is no room, and nobody to make some"
        go_on.set()
        assert await asyncio.gather(*answers) == ["200"] * 5
        await until(lambda: len(served.limits) == 0)
        assert await served.status(GET + b"\r\n") == "200"


async def test_connections_in_their_tls_handshake_are_counted(tmp_path: Path) -> None:
    folder = made(tmp_path / "ours")
    async with serving(TlsFiles(folder / "http.crt", folder / "http.key"), connections_max=20) as served:
        for _ in range(60):
            await served.connect(b"\x16\x03\x01")
        await until(lambda: served.closed >= 40)
        assert len(served.limits) <= 20


async def test_heads_without_end_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "TOTAL_BYTES_MAX", 10 * BODY_BYTES)
    async with serving() as served:
        for _ in range(40):
            await served.connect(GET + b"X-Long: " + b"x" * BODY_BYTES)
        await until(lambda: served.closed >= 30)
        assert served.limits.total_bytes <= 10 * BODY_BYTES
        assert await served.status(GET + b"\r\n") == "200"


async def test_unread_answers_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "TOTAL_BYTES_MAX", 2 * len(MUCH))
    async with serving() as served:
        for _ in range(6):
            _, writer = await asyncio.open_connection("127.0.0.1", served.server.port, limit=1)
            served.clients.append(writer)
            writer.write(b"GET /much HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: served.closed >= 3)
        assert served.limits.total_bytes <= 2 * len(MUCH)
        assert await served.status(GET + b"\r\n") == "200"


async def test_unread_answers_that_fit_the_buffers_are_counted() -> None:
    """Their number is not bounded, so each counts, however small it is."""
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port, limit=1)
        served.clients.append(writer)
        writer.write((b"GET /small HTTP/1.1\r\nHost: localhost\r\n\r\n") * PIPELINED_MAX)
        await reader.readexactly(1)
        while not served.limits.total_bytes:
            for each in served.connections:
                each.end_if_stalled(60.0)
            writer.write(b"GET /small HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.sleep(0.001)


async def test_one_long_answer_to_a_client_that_reads_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "TOTAL_BYTES_MAX", len(MUCH))
    monkeypatch.setattr(connection_limits, "COUNTED_BYTES_MAX", len(MUCH) // 4)
    async with serving() as served:
        asked = b"GET /much HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answers = [await served.connect(asked) for _ in range(3)]
        for answer in answers:
            assert len(await answer.read()) > len(MUCH)
        assert served.closed == 0


async def test_requests_that_wait_behind_another_are_bounded() -> None:
    async with serving() as served:
        seen = await served.statuses((GET + b"\r\n") * 2000)
        assert set(seen) == {"200", "429"}
        assert seen["429"] == 1
        assert seen["200"] <= PIPELINED_MAX + 1
    async with serving() as served:
        seen = await served.statuses((GET + b"\r\n") * PIPELINED_MAX + GET + b"Connection: close\r\n\r\n")
        assert seen == {"200": PIPELINED_MAX + 1}


async def test_bytes_that_wait_behind_a_request_are_bounded() -> None:
    async with serving() as served:
        served.backend.script = lambda _: [asyncio.Event()]
        body = b'{"model": "%b", "prompt": "x"}' % tiny.MODEL.encode()
        first = POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        reader = await served.connect(first + POST + b"Content-Length: 400000\r\n\r\n" + b" " * 400_000)
        await until(lambda: len(served.backend.streams) == 1)
        (connection,) = served.connections
        await until(lambda: connection.is_refused)
        assert connection.flow.read_paused or connection.is_refused
        assert not reader.at_eof(), "the first request is still being answered"


@pytest.mark.parametrize(
    "length", [b"Content-Length: 65000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nea60\r\n"]
)
async def test_the_body_of_a_client_without_a_key_is_not_read(length: bytes) -> None:
    async with serving(keys=True) as served:
        reader = await served.connect(POST + length + b" " * BODY_BYTES)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 401")
        assert b"\r\nconnection: close\r\n" in head
        await reader.read()
        assert all(not each.cycle.body for each in served.connections)
        await until(lambda: not served.connections)


async def test_a_client_without_a_key_that_sends_a_whole_body_reads_the_reason() -> None:
    """This holds even if the answer comes long before the end of the body."""
    async with serving(keys=True) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        served.clients.append(writer)
        writer.write(POST + b"Content-Length: 3000000\r\n\r\n")
        for _ in range(30):
            writer.write(b" " * 100_000)
            await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")


async def test_a_request_without_a_body_leaves_the_connection_open_after_a_401() -> None:
    """A browser sends its key on the connection on which it was asked for one."""
    async with serving(keys=True) as served:
        reader = await served.connect(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in head.lower()
        await reader.readuntil(b"}}")
        served.clients[-1].write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + KEYED + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b" " * BODY_BYTES], ids=["nothing of it", "most of it"])
async def test_an_unread_body_has_a_time_limit_and_takes_no_memory(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttp, "head_s", 0.3)
    async with serving() as served:
        asked = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 65000\r\n\r\n"
        reader = await served.connect(asked + sent)
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        (connection,) = served.connections
        await until(lambda: connection.cycle.response_complete)
        assert not connection.cycle.body
        await reader.read()
        await until(lambda: not served.connections)
