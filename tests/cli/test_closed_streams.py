"""Tests of commands started without standard streams, as by `baton … <&- >&- 2>&-`."""

import os
import signal
import subprocess
import sys
from itertools import chain, combinations
from pathlib import Path

import httpx
import pytest

from tests.http import web
from tests.launch.stand_ins import PATIENCE_S, Parts, eventually, gone
from tests.launch.test_serve import SERVES, children
from tests.ports import free_port
from tests.suite.marks import ends_by_itself

CLOSED = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-"}
SETS = list(chain.from_iterable(combinations(CLOSED, count) for count in (1, 2, 3)))

LOOKS = """
import baton.cli, os, subprocess, sys
opened = os.open(os.devnull, os.O_RDONLY)
sees = "import os; [os.fstat(number) for number in (0, 1, 2)]"
code = subprocess.call([sys.executable, "-c", sees], close_fds=False)
for stream in (sys.stdout, sys.stderr): print("written", file=stream, flush=True)
with open(sys.argv[1], "w") as told: print(opened > 2, code, repr(sys.stdin.read()), file=told)
"""


def closed(command: list[str], streams: tuple[str, ...] = tuple(CLOSED)) -> list[str]:
    """Return `command` without these streams, and without a shell around it."""
    return ["sh", "-c", f'exec "$@" {" ".join(CLOSED[each] for each in streams)}', "sh", *command]


@pytest.mark.parametrize("streams", SETS, ids="-".join)
def test_no_file_of_a_library_is_a_standard_stream_here_or_in_a_child(
    streams: tuple[str, ...], tmp_path: Path
) -> None:
    told = tmp_path / "told"
    command = closed([sys.executable, "-c", LOOKS, str(told)], streams)
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=PATIENCE_S)
    assert told.read_text() == "True 0 ''\n"


async def test_a_stack_starts_its_parts_and_stops_them(parts: Parts, unused_tcp_port: int) -> None:
    script = f"import baton.cli\n{SERVES}"
    command = [sys.executable, "-c", script, str(parts.journal_file), str(unused_tcp_port), "runs"]
    with subprocess.Popen(closed(command)) as process:
        await eventually(lambda: {"prefill up", "decode up"} <= set(parts.journal) or gone(process.pid))
        started = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert len(started) == 3
    await eventually(lambda: all(gone(child) for child in started))


@pytest.mark.stack
async def test_a_part_serves_and_drains(demo_model_dir: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "baton.cli.main", "bootstrap", "--model", str(demo_model_dir)]
    command += ["--http-port", str(port), "--grpc-port", "0"]

    def answers() -> bool:
        try:
            return web().get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.TransportError:
            return False

    with subprocess.Popen(closed(command)) as process:
        try:
            await eventually(lambda: answers() or gone(process.pid))
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["prefill", "--cpus", "99999"], 2),
        (["decode", "--cpus", "99999"], 2),
        (["serve", "--model", "/nowhere"], 1),
        (["chat", "--url", "http://127.0.0.1:1"], 1),
        (["explain", "none", "--url", "http://127.0.0.1:1"], 1),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_command_ends_with_its_own_exit_code(words: list[str], code: int) -> None:
    command = closed([sys.executable, "-m", "baton.cli.main", *words])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with ends_by_itself():
        assert subprocess.run(command, env=environ, timeout=PATIENCE_S, check=False).returncode == code
