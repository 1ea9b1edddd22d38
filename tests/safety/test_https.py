"""Tests of TLS at the HTTP server: renewed certificates, endless heads, connections without a head."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import httpx
import pytest
from fastapi import FastAPI, Request

from baton.bootstrap.settings import BootstrapSettings
from baton.runtime.errors import SettingsError, StartupError
from baton.runtime.file_changes import LOOK_S, FileChanges
from baton.runtime.listening_ports import bind_port
from baton.runtime.settings import load
from baton.runtime.tls_files import TlsFiles
from baton.web.bounded_http import HEAD_BYTES_MAX, BoundedHttp
from baton.web.http_server import serve_http
from tests.safety.certificates import made
from tests.web.test_http_server import LOOPS, unread

PATIENCE_S = 20.0


def application() -> FastAPI:
    app = FastAPI()
    may_answer = asyncio.Event()

    @app.get("/slow")
    async def slow() -> str:
        await may_answer.wait()
        return "slow"

    @app.post("/slow")
    async def let_answer() -> None:
        may_answer.set()

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.post("/body")
    async def body(request: Request) -> int:
        return len(await request.body())

    return app


@asynccontextmanager
async def serving(files: TlsFiles | None) -> AsyncIterator[int]:
    server = await serve_http(application(), bind_port("127.0.0.1", 0, "--port"), 1, files)
    try:
        yield server.port
    finally:
        await server.stop()


def believing(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "ca.crt"))


async def test_the_name_and_the_authority_are_checked_by_any_client(ours: Path, strangers: Path) -> None:
    files = TlsFiles(ours / "http.crt", ours / "http.key")
    async with serving(files) as port:
        for host in ("127.0.0.1", "localhost"):
            async with httpx.AsyncClient(verify=believing(ours), trust_env=False) as http:
                assert (await http.get(f"https://{host}:{port}/health")).json() == "ok"
        for context in (believing(strangers), ssl.create_default_context()):
            async with httpx.AsyncClient(verify=context, trust_env=False) as http:
                with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                    await http.get(f"https://127.0.0.1:{port}/health")
        async with httpx.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://127.0.0.1:{port}/health")
        old = believing(ours)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.set_ciphers("ECDHE")
        async with httpx.AsyncClient(verify=old, trust_env=False) as http:
            assert (await http.get(f"https://127.0.0.1:{port}/health")).json() == "ok"


async def test_whoever_started_the_server_believes_its_very_certificate_alone(
    ours: Path, strangers: Path
) -> None:
    files, others = (TlsFiles(each / "http.crt", each / "http.key") for each in (ours, strangers))
    async with serving(files) as port:
        async with httpx.AsyncClient(verify=files.pinned(), trust_env=False) as http:
            assert (await http.get(f"https://127.0.0.1:{port}/health")).json() == "ok"
        async with httpx.AsyncClient(verify=others.pinned(), trust_env=False) as http:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await http.get(f"https://127.0.0.1:{port}/health")


@LOOPS
def test_who_reads_nothing_of_a_whole_answer_is_hung_up_on(
    loop: Callable[[], asyncio.AbstractEventLoop], ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole answer was given to the kernel at once, so the server sees nothing that waits."""
    monkeypatch.setattr(BoundedHttp, "stalled_s", 0.1)
    files = TlsFiles(ours / "http.crt", ours / "http.key")
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(unread(until_hung_up_on=True, tls=files, believed=believing(ours)))


def test_a_certificate_that_is_missing_is_told_as_such(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "http.crt", tmp_path / "http.key", flags="--http-tls")
    with pytest.raises(StartupError, match=r"--http-tls-cert .* cannot be read: No such file or directory$"):
        files.pinned()


async def test_a_renewed_certificate_is_shown_to_who_connects_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(
        "baton.runtime.tls_files.FileChanges", lambda paths: FileChanges(paths, lambda: now_s[0])
    )
    before, after = made(tmp_path / "before"), made(tmp_path / "after")
    live = TlsFiles(tmp_path / "live.crt", tmp_path / "live.key")

    def put(folder: Path) -> None:
        for name, path in (("http.crt", live.cert), ("http.key", live.key)):
            (tmp_path / "new").write_bytes((folder / name).read_bytes())
            (tmp_path / "new").replace(path)
        now_s[0] += LOOK_S

    put(before)
    async with serving(live) as port:
        url = f"https://127.0.0.1:{port}/health"
        async with httpx.AsyncClient(verify=believing(before), trust_env=False) as first:
            assert (await first.get(url)).json() == "ok"
            put(after)
            async with httpx.AsyncClient(verify=believing(after), trust_env=False) as second:
                assert (await second.get(url)).json() == "ok"
            assert (await first.get(url)).json() == "ok", "a connection that is open goes on"
        live.cert.write_text("half")
        now_s[0] += LOOK_S
        async with httpx.AsyncClient(verify=believing(after), trust_env=False) as third:
            assert (await third.get(url)).json() == "ok", "what cannot be used changes nothing"


TOO_SLOW: Final = b'"code": "request_timeout"}}'
GET: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST: Final = b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"


@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (b"GET /", b"x" * 4096),
        (GET + b"X-Begun: ", b"x" * 4096),
        (GET, b"X-Filler: " + b"y" * 200 + b"\r\n"),
        (POST + b"X-Begun: ", b"x" * 4096),
        (POST, b"X-Filler: " + b"y" * 200 + b"\r\n"),
    ],
    ids=["path", "one header", "many headers", "one trailer", "many trailers"],
)
async def test_a_head_or_trailers_without_end_are_hung_up_on(begun: bytes, piece: bytes) -> None:
    async with serving(None) as port, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(reader.read())
        writer.write(begun)
        sent = 0
        while not reading.done() and sent < 64 * HEAD_BYTES_MAX:
            writer.write(piece)
            sent += len(piece)
            with suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(0)
        assert sent < 64 * HEAD_BYTES_MAX
        writer.close()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_long_head_and_a_long_body_are_served() -> None:
    async with serving(None) as port, httpx.AsyncClient(trust_env=False) as http:
        headers = {f"X-{at}": "y" * 1000 for at in range(40)}
        reply = await http.get(f"http://127.0.0.1:{port}/health", headers=headers)
        assert reply.json() == "ok"
        body = b"z" * (8 * HEAD_BYTES_MAX)
        for content in (body, pieces(body), body):
            reply = await http.post(f"http://127.0.0.1:{port}/body", content=content)
            assert reply.json() == len(body)


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    """Yield the body in many small chunks."""
    for at in range(0, len(body), 100):
        yield body[at : at + 100]


async def closed(port: int, sent: bytes) -> bytes:
    """Send that and wait until the server hangs up. What it answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.fixture
def short_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "head_s", 0.5)


@pytest.mark.usefixtures("short_heads")
@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"GET /hea", TOO_SLOW),
        (GET + b"X-Begun: ", TOO_SLOW),
        (GET + b"\r\n" + GET, TOO_SLOW),
    ],
    ids=["nothing", "half a line", "half a head", "half a second head"],
)
async def test_whoever_takes_too_long_to_ask_is_hung_up_on(sent: bytes, answered: bytes) -> None:
    async with serving(None) as port, asyncio.timeout(PATIENCE_S):
        assert (await closed(port, sent)).endswith(answered)


@pytest.mark.usefixtures("short_heads")
@pytest.mark.parametrize(
    ("asked", "more", "told"),
    [
        (GET + b"\r\n", b"GET /hea", TOO_SLOW),
        (GET + b"\r\n", b"\r\n", b""),
        (b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n", b"half", b""),
        (b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n", b"late", b""),
    ],
    ids=["half a head", "an empty line", "half a body that nobody reads", "a body that nobody reads"],
)
async def test_a_first_byte_after_an_answer_does_not_keep_the_connection_for_ever(
    asked: bytes, more: bytes, told: bytes
) -> None:
    async with serving(None) as port, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asked)
        await reader.readuntil(b"}" if b"/none" in asked else b'"ok"')
        writer.write(more)
        answer = await reader.read()
        assert answer.endswith(told)
        assert bool(answer) == bool(told)
        writer.close()


@pytest.mark.usefixtures("short_heads")
async def test_a_rest_between_requests_a_slow_body_and_a_slow_answer_are_not_cut_off() -> None:
    """Each goes on after a silence longer than the time after which a stalled client is cut off."""
    async with serving(None) as port, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        await reader.readuntil(b'"ok"')
        await closed(port, b"")
        writer.write(b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nha")
        await closed(port, b"")
        writer.write(b"lf")
        assert (await reader.readuntil(b"\r\n\r\n4")).startswith(b"HTTP/1.1 200")
        writer.write(GET + b"\r\n")
        assert (await reader.readuntil(b'"ok"')).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.usefixtures("short_heads")
async def test_half_a_head_behind_a_request_does_not_cut_its_answer_off() -> None:
    async with serving(None) as port, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        await closed(port, b"")
        writer.write(b"lth HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.post(f"http://127.0.0.1:{port}/slow")
        assert (await reader.readuntil(b'"slow"')).startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(b'"ok"')).endswith(b'"ok"')
        writer.close()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"http_tls_cert": "a"}, "--http-tls-cert given without --http-tls-key: give all or none"),
        (
            {"tls_cert": "a", "tls_ca": "b"},
            "--tls-cert and --tls-ca given without --tls-key: give all or none",
        ),
        ({"admin_host": "0.0.0.0"}, "--admin-host 0.0.0.0 without --admin-port"),
    ],
)
def test_settings_that_belong_together_are_asked_for_together(flags: dict[str, str], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        load(BootstrapSettings, flags, {})
