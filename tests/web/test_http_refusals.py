"""Tests that all refusals before a route have one form and a request id, and are counted once."""

import asyncio
import json
import logging
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.runtime.listening_ports import bind_port
from baton.runtime.tls_files import TlsFiles
from baton.web.bounded_http import HEAD_BYTES_MAX, HEADERS_MAX, BoundedHttp
from baton.web.closed_connections import ClosedConnections
from baton.web.host_names import HostNames
from baton.web.http_server import serve_http
from baton.web.probe_pages import serve_metrics
from tests.api import tiny
from tests.api.scripted import ScriptedBackend
from tests.safety.certificates import made

PATIENCE_S: Final = 20.0
GET: Final = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
POST: Final = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED: Final = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LONG: Final = b"x" * (HEAD_BYTES_MAX + 1)

ENDS: Final[dict[str, tuple[bytes, int, str]]] = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http"),
    "garbage": (b"\x00\xff\xfe\r\n\r\n", 400, "invalid_http"),
    "SSH": (b"SSH-2.0-OpenSSH_9.2\r\n", 400, "invalid_http"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http"),
    "another method": (b"BREW /pot HTTP/1.1\r\nHost: localhost\r\n\r\n", 501, "not_implemented"),
    "a tunnel": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n", 400, "invalid_http"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    "two hosts": (GET + b"Host: localhost\r\n\r\n", 400, "invalid_http"),
    "a host that is none": (b"GET /health HTTP/1.1\r\nHost: a b\r\n\r\n", 400, "invalid_http"),
    "another host": (b"GET /health HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", 421, "unknown_host"),
    "another host in the target": (
        b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 421, "unknown_host",
    ),
    "a target that is none": (b"GET health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
    "two lengths": (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "invalid_http"),
    "a long target": (b"GET /" + LONG + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414, "uri_too_long"),
    "a long target without an end": (b"GET /" + LONG, 414, "uri_too_long"),
    "a long field": (GET + b"X-Long: " + LONG + b"\r\n\r\n", 431, "header_fields_too_large"),
    "a long field without an end": (GET + b"X-Long: " + LONG, 431, "header_fields_too_large"),
    "many fields": (GET + b"X: y\r\n" * HEADERS_MAX + b"\r\n", 431, "header_fields_too_large"),
    "long trailers": (
        CHUNKED + b"1\r\nx\r\n0\r\nX-Long: " + LONG + b"\r\n\r\n", 431, "header_fields_too_large",
    ),
    "a chunk that is none": (CHUNKED + b"zz\r\nx\r\n", 400, "invalid_http"),
    "a slow head": (GET + b"X-Slow: ", 408, "request_timeout"),
    "a slow line": (b"GE", 408, "request_timeout"),
    "another path": (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n", 404, "not_found"),
    "a method of another route": (
        b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, "method_not_allowed",
    ),
    "a long body": (POST + b"Content-Length: 999999999\r\n\r\n", 413, "request_too_large"),
}  # fmt: skip
"""Bytes that a client sends, with the answer's status and code."""


@dataclass
class Served:
    port: int
    tls: ssl.SSLContext | None
    registry: CollectorRegistry

    def counted(self) -> Counter[str]:
        """Return the counts of requests by status."""
        found: Counter[str] = Counter()
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name == "baton_http_requests_total" and sample.value:
                    found[sample.labels["status"]] += int(sample.value)
        return found

    async def told(
        self, sent: bytes, piece: int = 10**9, most: int = 10
    ) -> list[tuple[int, dict[str, str], Any]]:
        """Return the answers to these pieces, until the server closes the connection or `most` have come."""
        name = None if self.tls is None else "localhost"
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.tls, server_hostname=name
        )
        for at in range(0, len(sent), piece):
            writer.write(sent[at : at + piece])
            await asyncio.sleep(0)
        answers: list[tuple[int, dict[str, str], Any]] = []
        while len(answers) < most and (line := await reader.readline()):
            fields = [(await reader.readuntil(b"\r\n"))]
            while fields[-1] != b"\r\n":
                fields.append(await reader.readuntil(b"\r\n"))
            head = dict(each.decode().strip().lower().split(": ", 1) for each in fields[:-1])
            body = await reader.readexactly(int(head["content-length"]))
            answers.append((int(line.split()[1]), head, json.loads(body)))
        writer.close()
        return answers


@asynccontextmanager
async def serving(
    files: TlsFiles | None = None, authority: Path | None = None, **how: Any
) -> AsyncIterator[Served]:
    registry = CollectorRegistry()
    router = APIRouter()

    @router.get("/health")
    async def health(request: Request) -> dict[str, str]:
        return {"status": "ok"}

    app = create_app(ScriptedBackend(), tiny.model(), registry, routers=[router])
    sock = bind_port("127.0.0.1", 0, "test")
    server = await serve_http(
        app, sock, 1, files, answers_refusals=True, connections=ClosedConnections(registry), **how
    )
    tls = None if authority is None else ssl.create_default_context(cafile=str(authority / "ca.crt"))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Served(server.port, tls, registry)
    finally:
        await server.stop()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "head_s", 0.5)
    monkeypatch.setattr(BoundedHttp, "linger_s", 0.1)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("certs") / "ours")


def check(answer: tuple[int, dict[str, str], Any], status: int, code: str) -> None:
    got, head, body = answer
    assert (got, body["error"]["code"]) == (status, code)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert head["x-request-id"]
    assert head["content-type"] == "application/json"
    assert head["x-content-type-options"] == "nosniff"
    assert head["cross-origin-resource-policy"] == "same-origin"


CLOSES: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("over", ["plain", "tls"])
@pytest.mark.parametrize("piece", [10**9, 4096], ids=["at once", "in pieces"])
async def test_what_ends_before_a_route_has_one_shape_an_id_and_is_counted_once(
    piece: int, over: str, certificates: Path
) -> None:
    files = TlsFiles(certificates / "http.crt", certificates / "http.key") if over == "tls" else None
    expected: Counter[str] = Counter()
    async with serving(files, certificates if files else None) as served:
        for sent, status, code in ENDS.values():
            goes_on = status in (404, 405, 413)
            answers = await served.told(sent, piece, most=1 if goes_on else 10)
            assert len(answers) == 1
            check(answers[0], status, code)
            expected[str(status)] += 1
            assert served.counted() == expected, sent[:50]


async def test_a_refusal_waits_for_the_answers_that_were_asked_for_before_it() -> None:
    async with serving() as served:
        answers = await served.told((GET + b"\r\n") * 3 + b"\x00 is no HTTP\r\n\r\n" + GET + b"\r\n")
        assert [status for status, _, _ in answers] == [200, 200, 200, 400]
        assert sum(served.counted().values()) == 4


async def test_a_client_that_sends_on_gets_to_read_why_it_is_refused() -> None:
    async with serving() as served:
        [answer] = await served.told(GET + b"X-Long: " + LONG * 16)
        check(answer, 431, "header_fields_too_large")


async def test_a_head_of_the_most_bytes_and_fields_is_served() -> None:
    fields = b"".join(b"X-%d: y\r\n" % at for at in range(HEADERS_MAX - 2))
    field = b"X-Long: " + b"x" * (HEAD_BYTES_MAX - 200) + b"\r\n"
    async with serving() as served:
        for more in (fields, field):
            [(status, _, _)] = await served.told(GET + more + b"Connection: close\r\n\r\n")
            assert status == 200


async def test_refused_clients_fill_no_log_and_are_logged_with_an_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with serving() as served:
            for _ in range(20):
                await served.told(b"\x00 is no HTTP\r\n\r\n")
    [line] = [each for each in caplog.records if "refused before it was a request" in each.getMessage()]
    assert vars(line)["baton_fields"]["client"] == "127.0.0.1"
    assert [each for each in caplog.records if "answered" in each.getMessage()] == []


async def test_workers_pages_refuse_in_the_same_shape() -> None:
    sock = bind_port("127.0.0.1", 0, "test")
    server = await serve_metrics(sock, CollectorRegistry(), list, list, list)
    served = Served(server.port, None, CollectorRegistry())
    try:
        async with asyncio.timeout(PATIENCE_S):
            for what in ("garbage", "another host", "many fields"):
                sent, status, code = ENDS[what]
                [answer] = await served.told(sent)
                check(answer, status, code)
            [(status, head, _)] = await served.told(CLOSES)
            assert (status, head["x-content-type-options"]) == (200, "nosniff")
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("host", "target", "strict", "allowed", "any_name"),
    [
        (b"127.0.0.1:8000", b"/", None, None, None),
        (b"[::1]:8000", b"/", None, None, None),
        (b"localhost", b"/", None, None, None),
        (b"LocalHost.:80", b"/", None, None, None),
        (b"baton.localhost", b"/", None, None, None),
        (b"10.1.2.3", b"/health", None, None, None),
        (b"localhost", b"http://127.0.0.1/health", None, None, None),
        (b"llm.example", b"/", 421, None, None),
        (b"LLM.example:443", b"/", 421, None, None),
        (b"localhost.evil.example", b"/", 421, 421, None),
        (b"127.0.0.1.evil.example", b"/", 421, 421, None),
        (b"localhost", b"http://evil.example/", 421, 421, None),
        (b"", b"/", 421, 421, None),
        (b"a@localhost", b"/", 400, 400, 400),
        (b"localhost/", b"/", 400, 400, 400),
        (b"[::1", b"/", 400, 400, 400),
        (b"localhost:http", b"/", 400, 400, 400),
    ],
)
def test_by_which_names_a_server_is_called(
    host: bytes, target: bytes, strict: int | None, allowed: int | None, any_name: int | None
) -> None:
    for names, want in (
        (HostNames(any_name=False), strict),
        (HostNames(("llm.example.",), any_name=False), allowed),
        (HostNames(any_name=True), any_name),
    ):
        refusal = names.refusal("1.1", target, [host])
        assert (None if refusal is None else refusal.status) == want
    assert HostNames(any_name=False).refusal("1.0", b"/", []) is None


async def test_connections_without_tls_are_closed_counted_and_logged_at_a_limited_rate(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = TlsFiles(certificates / "http.crt", certificates / "http.key")
    with caplog.at_level(logging.WARNING):
        async with serving(files) as served:
            for _ in range(5):
                with suppress(ConnectionError):
                    assert await served.told(CLOSES) == []
            count = served.registry.get_sample_value(
                "baton_http_connections_hung_up_total", {"why": "no_tls"}
            )
            assert count == 5
    [line] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert vars(line)["baton_fields"]["client"] == "127.0.0.1"


def test_when_no_more_files_can_be_open_whoever_connects_is_hung_up_on_and_counted() -> None:
    """The server runs in a process with a small limit of open files. Afterwards its spare file is open
    again."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_FILES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    hung_up, lines, served = json.loads(done.stdout.splitlines()[-1])
    assert hung_up == 12
    assert lines == 1
    assert served == [200, 200]


OUT_OF_FILES: Final = r"""
import asyncio, json, logging, os, resource, socket
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from baton.web.closed_connections import ClosedConnections
from baton.web.http_server import serve_http
from baton.runtime.listening_ports import bind_port

lines = []
class Heard(logging.Handler):
    def emit(self, record):
        if "no more files" in record.getMessage():
            assert record.baton_fields["client"] == "127.0.0.1"
            lines.append(record)
logging.getLogger().addHandler(Heard())

async def ask(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    status = int((await reader.read()).split()[1])
    writer.close()
    await writer.wait_closed()
    while server.connections:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    return status

async def main():
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("x"))])
    registry = CollectorRegistry()
    server = await serve_http(app, bind_port("127.0.0.1", 0, ""), 1, connections=ClosedConnections(registry))
    served = [await ask(server)]
    clients = [socket.socket() for _ in range(12)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    filled = []
    try:
        while True:
            filled.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for client in clients:
        client.connect(("127.0.0.1", server.port))
        client.setblocking(False)
    for client in clients:
        try:
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        except ConnectionError:
            pass
    for each in filled:
        os.close(each)
    served.append(await ask(server))
    hung_up = registry.get_sample_value("baton_http_connections_hung_up_total", {"why": "open_files"})
    print(json.dumps([hung_up, len(lines), served]))
    await server.stop()

asyncio.run(asyncio.wait_for(main(), 50))
"""
