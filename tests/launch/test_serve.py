"""Tests of `baton serve` from its first line to its last, with programs that stand in for the services."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from rich.console import Console

from baton.cli.main import KNOWN
from baton.launch.screen import Screen
from baton.launch.serve import PREPARE, ServeStack
from baton.launch.serve_settings import load_serve
from baton.launch.stack_plan import BootstrapPorts, make_plan
from baton.runtime.clock import SystemClock
from baton.runtime.errors import StartupError
from baton.wire.receiver_secret import digest_of
from tests.launch.stand_ins import PATIENCE_S, Parts, eventually, gone

BOOTSTRAP = """
import http.server, json, signal, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
with open(sys.argv[2], "a") as journal: journal.write("bootstrap ended\\n")
"""
PREPARES = "print('progress: converting'); print('noise')"
CANNOT_PREPARE = "import sys; sys.exit('baton: error: the model /m is missing: give another with --model')"
BREAKS = "import sys; print('Traceback of sorts'); sys.exit(1)"


class StackCommands:
    """Command of each part."""

    def __init__(self, parts: Parts, port: int, prepare: str) -> None:
        self._parts = parts
        self._port = port
        self._prepare = prepare
        self.arguments: dict[str, Sequence[str]] = {}
        """Arguments of the latest start of each part."""

    def __call__(self, word: str, arguments: Sequence[str]) -> Sequence[str]:
        self.arguments[word] = arguments
        if word == PREPARE:
            return (sys.executable, "-c", self._prepare)
        if word == "bootstrap":
            return (sys.executable, "-c", BOOTSTRAP, str(self._port), str(self._parts.journal_file))
        return self._parts.command(word)


def stack(
    parts: Parts, port: int, prepare: str = PREPARES, to: IO[str] | None = None
) -> tuple[ServeStack, io.StringIO]:
    """Return a stack and its screen. `to`: where the screen writes, by default what is returned."""
    flags = {"port": str(port)}
    settings = load_serve(flags, {}, KNOWN)
    out = io.StringIO()
    screen = Screen(Console(file=to or out, width=80), SystemClock())
    commands = StackCommands(parts, port, prepare)
    plan = make_plan(settings, flags, {}, [0, 1], [BootstrapPorts(8100)])
    return ServeStack(settings, plan, dict(os.environ), screen, commands, parts.report_exit), out


async def test_it_shows_each_step_then_ready_then_drains(parts: Parts, unused_tcp_port: int) -> None:
    serve, out = stack(parts, unused_tcp_port)
    shutdown = asyncio.Event()
    task = asyncio.create_task(serve.serve(shutdown))
    await eventually(lambda: "Ctrl-C stops it." in out.getvalue() or task.done())
    await eventually(lambda: {"prefill up", "decode up"} <= set(parts.journal) or task.done())
    shutdown.set()
    assert await task == 0

    steps = [line.split(" (")[0] for line in out.getvalue().splitlines() if line.startswith("✓")]
    assert steps == [
        "✓ preparing the model demo",
        f"✓ starting the bootstrap on http://127.0.0.1:{unused_tcp_port}",
        "✓ starting prefill-0 on cores 0, decode-0 on cores 1",
        "✓ stopping: requests that started may finish; Ctrl-C again ends at once",
    ]
    assert f"Ready: tiny on http://127.0.0.1:{unused_tcp_port}" in out.getvalue()
    assert "  converting" in out.getvalue()
    assert "noise" not in out.getvalue()
    stopped = [line for line in parts.journal if not line.endswith(" up")]
    assert stopped[0] == "bootstrap ended"
    assert {"prefill ended", "decode ended"} <= set(stopped)


async def test_exit_by_starter_a_launcher_gets_a_file_for_its_ranks_and_no_digest(parts: Parts) -> None:
    """The end of a launcher does not prove that its ranks have ended. The next launcher, which gets the lock,
    knows.
    """
    flags = {"decode_tp": "2"}
    settings, commands = load_serve(flags, {}, KNOWN), StackCommands(parts, 0, PREPARES)
    plan = make_plan(settings, flags, {}, [0, 1, 2], [BootstrapPorts(8100)])
    screen = Screen(Console(file=io.StringIO()), SystemClock())
    serve = ServeStack(settings, plan, dict(os.environ), screen, commands, parts.report_exit)
    for part in plan.workers:
        child = await serve.start_part(part)
        await eventually(lambda part=part: f"{part.role} up" in parts.journal)  # type: ignore[misc]
        child.kill()
        await child.wait()
        launches = part.role == "decode"
        assert ("--exit-file" in commands.arguments[part.role]) == launches
        assert (parts.digests(part.role) == ["none"]) == launches == (not child.exit_secret)


async def test_it_goes_on_where_its_lines_cannot_be_written(parts: Parts, unused_tcp_port: int) -> None:
    """The launcher still reads its parts' output, and restarts parts that end."""
    parts.behaviour["prefill"] = "talks"
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    serve, _ = stack(parts, unused_tcp_port, to=full)
    shutdown = asyncio.Event()
    task = asyncio.create_task(serve.serve(shutdown))
    await eventually(lambda: {"prefill talked", "decode up"} <= set(parts.journal) or task.done())
    assert not task.done()
    decode = next(pid for pid in children() if b"\0decode\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(decode, signal.SIGKILL)
    await eventually(lambda: parts.journal.count("decode up") == 2 or task.done())
    await eventually(lambda: bool(parts.reported) or task.done())
    digests = parts.digests("decode")
    assert parts.reported == [("decode-0", decode)]
    assert [digest_of(each).hex() for each in parts.secrets] == digests[:1], "of the start that ended"
    assert digests[0] != digests[1]
    shutdown.set()
    assert await task == 0
    with pytest.raises(OSError, match="No space left"):
        full.close()


def children(of: int | None = None) -> list[int]:
    """Return the child processes of a process, by default this one."""
    pid = of or os.getpid()
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_it_is_ready_though_the_models_name_cannot_be_read(
    parts: Parts, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of its start may have been removed from the file meanwhile."""
    refusing = BOOTSTRAP.replace('{"data": [{"id": "tiny"}]}', '{"error": {"message": "no such key"}}')
    monkeypatch.setattr(sys.modules[__name__], "BOOTSTRAP", refusing)
    serve, out = stack(parts, unused_tcp_port)
    shutdown = asyncio.Event()
    task = asyncio.create_task(serve.serve(shutdown))
    await eventually(lambda: "Ctrl-C stops it." in out.getvalue() or task.done())
    assert f"Ready: demo on http://127.0.0.1:{unused_tcp_port}" in out.getvalue()
    shutdown.set()
    assert await task == 0


async def test_an_expired_certificate_fails_at_once(
    parts: Parts, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired")

    monkeypatch.setattr(httpx.AsyncClient, "get", refuse)
    serve, _ = stack(parts, unused_tcp_port)
    with pytest.raises(StartupError, match=r"is not trusted here .*certificate has expired"):
        await serve.serve(asyncio.Event())


async def test_a_model_that_is_missing_is_its_own_words(parts: Parts, unused_tcp_port: int) -> None:
    serve, out = stack(parts, unused_tcp_port, CANNOT_PREPARE)
    with pytest.raises(StartupError, match=r"^the model /m is missing: give another with --model$"):
        await serve.serve(asyncio.Event())
    assert "✓" not in out.getvalue()


async def test_a_preparation_that_breaks_shows_its_last_lines(parts: Parts, unused_tcp_port: int) -> None:
    serve, out = stack(parts, unused_tcp_port, BREAKS)
    with pytest.raises(StartupError, match=r"^preparing the model demo ended with exit code 1$"):
        await serve.serve(asyncio.Event())
    assert "Traceback of sorts" in out.getvalue()


async def test_stopping_while_the_model_is_prepared_ends_cleanly(parts: Parts, unused_tcp_port: int) -> None:
    serve, _ = stack(parts, unused_tcp_port, "import time; time.sleep(600)")
    shutdown = asyncio.Event()
    shutdown.set()
    assert await serve.serve(shutdown) == 0
    assert parts.journal == []


SERVES = """
import sys
from pathlib import Path
from baton.runtime.service_process import run
from tests.launch.stand_ins import Parts
from tests.launch.test_serve import stack
parts = Parts(Path(sys.argv[1]))
parts.behaviour = {"prefill": sys.argv[3], "decode": sys.argv[3]}
sys.exit(run(stack(parts, int(sys.argv[2]))[0].serve))
"""


async def test_the_second_ctrl_c_ends_everything_at_once(parts: Parts, unused_tcp_port: int) -> None:
    """The second Ctrl-C also restores the terminal's cursor, which a step's spinner had hidden."""
    command = [sys.executable, "-c", SERVES, str(parts.journal_file), str(unused_tcp_port), "deaf"]
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=theirs) as process:
        await eventually(lambda: {"prefill up", "decode up"} <= set(parts.journal))
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
        await eventually(lambda: "bootstrap ended" in parts.journal)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGINT
    assert os.read(ours, 2**16).endswith(b"\x1b[?25h\r\n")
    for each in (ours, theirs):
        os.close(each)
    assert len(started) == 3
    await eventually(lambda: all(gone(child) for child in started))
