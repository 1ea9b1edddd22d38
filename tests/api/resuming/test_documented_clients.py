"""The clients in docs/resuming.md are run as they stand there, behind a proxy that breaks connections."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.settings import ApiSettings
from baton.runtime.listening_ports import bind_port
from baton.web.http_server import serve_http
from tests.api.resuming.cases import CASES
from tests.api.resuming.routers import KEY, LIMITS, Pace, model
from tests.api.scripted import ScriptedBackend

PAGE: Final = Path(__file__).parents[3] / "docs" / "resuming.md"
CASE: Final = CASES["chat, tools"]
EVENTS: Final = 3
"""Number of whole events that a connection carries before it breaks."""
NODE: Final = shutil.which("node")
MAIN: Final = """
const [url, body] = process.argv.slice(2);
for await (const chunk of stream(url, JSON.parse(body))) console.log(JSON.stringify(chunk));
"""


def code(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


@asynccontextmanager
async def breaking(port: int) -> AsyncIterator[tuple[int, list[int]]]:
    """A proxy that breaks each connection after some events. Yields its port, and a list with an entry for
    each connection that it broke."""
    broken: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.create_task(_copy(reader, to_server))
        got = b""
        while chunk := await from_server.read(64):
            got += chunk
            writer.write(chunk)
            await writer.drain()
            if got.count(b"\n\n") > EVENTS:
                broken.append(len(got))
                break
        sending.cancel()
        to_server.transport.abort()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], broken
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(65_536):
        writer.write(chunk)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, list[int]]]:
    """A server whose connections break. Yields the URL of its chats, and the broken connections."""
    pace = Pace(1)
    backend = ScriptedBackend(lambda request: pace.steps(request, CASE.writer), LIMITS)
    app = create_app(backend, model(), CollectorRegistry(), ApiSettings(reasoning_key=KEY))
    server = await serve_http(app, bind_port("127.0.0.1", 0, "test"), graceful_timeout_s=5)
    try:
        async with breaking(server.port) as (port, broken):
            yield f"http://127.0.0.1:{port}{CASE.path}", broken
    finally:
        await server.stop()


def check(chunks: list[Any], broken: list[int]) -> None:
    """Check that the chunks are those of one whole answer, though connections broke."""
    assert len(broken) >= 3
    assert len({chunk["id"] for chunk in chunks}) == 1
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert usage["completion_tokens"] > 20
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert [delta.get("role") for delta in deltas].count("assistant") == 1
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "id" in call] == ["weather", "now"]
    first = "".join(call["function"]["arguments"] for call in calls if call["index"] == 0)
    assert json.loads(first)["city"].startswith("Paris ")


async def test_the_client_in_python_continues_its_stream() -> None:
    scope: dict[str, Any] = {}
    exec(code("python").replace("time.sleep(0.5)", "time.sleep(0)"), scope)
    stream: Callable[[str, Any], Iterator[Any]] = scope["stream"]
    async with served() as (url, broken):
        chunks = await asyncio.to_thread(lambda: list(stream(url, CASE.body)))
    check(chunks, broken)


@pytest.mark.skipif(NODE is None, reason="node is not installed")
async def test_the_client_in_typescript_continues_its_stream(tmp_path: Path) -> None:
    assert NODE is not None
    plain = re.sub(r": (string|object)\b", "", code("ts"))
    plain = re.sub(r"(?<=[\w)])!(?=[.;])", "", plain).replace("wake, 500", "wake, 0")
    script = tmp_path / "client.mjs"
    script.write_text(plain + MAIN, encoding="utf-8")
    async with served() as (url, broken):
        process = await asyncio.create_subprocess_exec(
            NODE, script, url, json.dumps(CASE.body), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    check([json.loads(line) for line in out.splitlines()], broken)
