"""Tests that a forked worker equals one that is started by its command."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from baton.launch import fork_server_client as module
from baton.launch.child import Child, start_child
from baton.launch.fork_server import READY
from baton.launch.fork_server_client import ForkServer
from baton.runtime.child_process import baton_command
from baton.runtime.clock import SystemClock
from tests.launch.stand_ins import PATIENCE_S, eventually, gone
from tests.suite.marks import ends_by_itself

pytestmark = pytest.mark.asyncio(loop_scope="module")

LISTENING = re.compile(r" listening .*pid=(\d+)")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
REFUSED = ("prefill", "--cpus", "99999")


class Preloaded:
    """A fork server, with the lines that it showed."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        # A variable of its own that would end any worker that has it.
        environ = {**CLEAN, "BATON_THREADS": "many"}
        self.forks = ForkServer(environ, lambda _: True, self.shown.append, SystemClock())

    async def fork(self, *words: str, **environ: str) -> tuple[Child, list[str]]:
        shown: list[str] = []
        child = await self.forks.fork("part", words, {**CLEAN, **environ}, lambda _: True, shown.append)
        assert child is not None, self.shown
        return child, shown


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def preloaded() -> AsyncIterator[Preloaded]:
    one = Preloaded()
    async with one.forks:
        yield one
        pid = one.forks.pid
    assert pid is not None
    assert gone(pid)


def worker(model: Path) -> tuple[str, ...]:
    """Return the words of a prefill worker without a bootstrap."""
    words = ("prefill", "--model", str(model), "--bootstrap", "127.0.0.1:1", "--name", "prefill-9")
    return (*words, "--cpus", "0", "--host", "127.0.0.1")


def listening(shown: list[str]) -> Callable[[], bool]:
    return lambda: any(LISTENING.search(line) for line in shown)


async def started(name: str, words: tuple[str, ...]) -> tuple[Child, list[str]]:
    """Start the same worker by its command. Return it with its lines."""
    shown: list[str] = []
    command = baton_command(*words)
    with ends_by_itself():
        return await start_child(name, command, CLEAN, lambda _: True, shown.append), shown


async def test_a_forked_worker_is_a_child_of_its_requester_and_looks_like_its_command(
    preloaded: Preloaded, demo_model_dir: Path
) -> None:
    words = worker(demo_model_dir)
    child, shown = await preloaded.fork(*words)
    await eventually(listening(shown))
    process = psutil.Process(child.pid)

    assert LISTENING.search("".join(shown))[1] == str(child.pid)  # type: ignore[index]
    assert process.ppid() == os.getpid()
    assert process.cmdline() == [sys.executable, "-m", "baton.cli.main", *words]
    assert os.getsid(child.pid) == child.pid
    assert process.cpu_affinity() == [0]
    files = {number: Path(f"/proc/{child.pid}/fd/{number}").readlink() for number in (0, 1, 2)}
    assert files[0] == Path("/dev/null")
    assert files[1] == files[2]
    assert files[1].name.startswith("pipe:")

    child.terminate()
    assert await child.wait() == 0
    assert shown[-1].endswith("asked to stop before it was ready")


async def test_ranks_are_forked_from_their_launchers_own_memory(
    preloaded: Preloaded, demo_model_dir: Path
) -> None:
    """The ranks share the memory that the fork server laid out, so nothing is imported again."""
    child, shown = await preloaded.fork(*worker(demo_model_dir), "--pp", "2", "--cpus", "0,1")
    await eventually(lambda: sum(bool(LISTENING.search(line)) for line in shown) == 2)
    below = psutil.Process(child.pid).children()
    assert sorted(each.cmdline()[2] for each in below) == [
        "baton.cli.forked_commands",
        "baton.cli.main",
        "baton.cli.main",
    ]
    assert preloaded.forks.pid is not None
    assert (
        len({stack_of(pid) for pid in (preloaded.forks.pid, child.pid, *(each.pid for each in below))}) == 1
    )
    child.kill()
    await child.wait()
    await eventually(lambda: all(gone(each.pid) for each in below))


def stack_of(pid: int) -> str:
    """Return the address of a process's stack. A process that was not forked has another one."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.split()[0].split("-")[1] for line in lines if "[stack]" in line)


async def test_its_end_by_a_signal_is_seen(preloaded: Preloaded, demo_model_dir: Path) -> None:
    child, shown = await preloaded.fork(*worker(demo_model_dir))
    await eventually(listening(shown))
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    assert gone(child.pid)
    child.kill()  # nobody else has its number


@pytest.mark.parametrize(
    "words",
    [REFUSED, ("prefill", "--no-such-flag"), ("version",)],
    ids=["a start-up error", "a mistake in its flags", "no error"],
)
async def test_its_lines_and_its_exit_code_are_those_of_its_command(
    preloaded: Preloaded, words: tuple[str, ...]
) -> None:
    child, shown = await preloaded.fork(*words)
    other, others = await started("part", words)
    codes = await child.wait(), await other.wait()
    assert codes[0] == codes[1]
    assert shown == others
    assert child.startup_error() == other.startup_error()


async def test_its_environment_is_its_own(preloaded: Preloaded) -> None:
    child, _ = await preloaded.fork(*REFUSED)
    assert await child.wait() == 2
    assert (child.startup_error() or "").startswith("--cpus: '99999'")
    child, _ = await preloaded.fork(*REFUSED, BATON_PAGE_TOKENS="several")
    assert await child.wait() == 2
    assert (child.startup_error() or "").startswith("BATON_PAGE_TOKENS")


async def test_a_worker_without_a_descriptor_does_not_begin_and_the_server_comes_back(
    preloaded: Preloaded, demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, shown = await preloaded.fork(*worker(demo_model_dir))
    await eventually(listening(shown))
    first = preloaded.forks.pid
    forked: list[int] = []

    def refuse(pid: int) -> None:
        forked.append(pid)
        raise OSError("no descriptor is free")

    with monkeypatch.context() as patched:
        patched.setattr(module, "ForkedProcess", refuse)
        assert await preloaded.forks.fork("part", REFUSED, CLEAN, lambda _: True, shown.append) is None
    await eventually(lambda: gone(forked[0]))
    assert os.waitpid(forked[0], 0) == (forked[0], 1 << 8), "it did nothing"
    await eventually(lambda: preloaded.forks.pid is None)
    assert await preloaded.forks.fork("part", REFUSED, CLEAN, lambda _: True, shown.append) is None
    assert not gone(living.pid), "who was forked does not end with what it was forked from"

    await eventually(lambda: preloaded.forks.pid not in (None, first))
    child, _ = await preloaded.fork(*REFUSED)
    assert await child.wait() == 2
    living.kill()
    await living.wait()
    assert "part could not be forked (no descriptor is free): it is started by its command" in preloaded.shown
    assert "preloaded was killed by SIGKILL: workers start without it until it is back" in preloaded.shown


async def test_a_reply_that_comes_too_late_is_not_taken_for_the_next_ones() -> None:
    shown: list[str] = []
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    with theirs, subprocess.Popen(sleep) as process:
        theirs.send(READY)
        loaded = process.pid, ours
        async with ForkServer(CLEAN, lambda _: True, shown.append, SystemClock(), loaded) as forks:
            first = asyncio.create_task(forks.fork("first", REFUSED, CLEAN, lambda _: True, shown.append))
            assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b"o"
            first.cancel()
            [ended] = await asyncio.gather(first, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError)
            theirs.send(f"{os.getpid()} ".encode())
            assert await forks.fork("second", REFUSED, CLEAN, lambda _: True, shown.append) is None
            await eventually(lambda: gone(process.pid))


async def test_workers_start_by_their_commands_if_imports_fail(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a broken library')")
    shown: list[str] = []
    environ = {**CLEAN, "PYTHONPATH": str(tmp_path)}
    async with ForkServer(environ, lambda _: False, shown.append, SystemClock()) as forks:
        assert await forks.fork("part", REFUSED, CLEAN, lambda _: True, shown.append) is None
        assert forks.pid is None
    assert shown == []


async def test_nothing_is_imported_if_the_system_has_no_pidfd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> int:
        raise OSError("no such system call")

    async def start(*_: object) -> None:
        raise AssertionError("nothing is started")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(module, "start_child", start)
    async with ForkServer(CLEAN, lambda _: True, print, SystemClock()) as forks:
        assert await forks.fork("part", REFUSED, CLEAN, lambda _: True, print) is None


KILLED = """
import asyncio, os, sys
from baton.launch.fork_server_client import ForkServer
from baton.runtime.clock import SystemClock
async def main():
    async with ForkServer(dict(os.environ), lambda _: True, print, SystemClock()) as forks:
        tell = lambda line: print(line, forks.pid, child.pid, flush=True)
        child = await forks.fork("part", tuple(sys.argv[1:]), dict(os.environ), lambda _: True, tell)
        await child.wait()
asyncio.run(main())
"""


async def test_the_server_and_its_workers_die_with_the_requester(demo_model_dir: Path) -> None:
    command = [sys.executable, "-c", KILLED, *worker(demo_model_dir)]
    with subprocess.Popen(command, env=CLEAN, stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        line = await asyncio.to_thread(asker.stdout.readline)
        pids = [int(each) for each in line.split()[-2:]]
        assert not any(gone(pid) for pid in pids)
        asker.kill()
        asker.wait(PATIENCE_S)
        await eventually(lambda: all(gone(pid) for pid in pids))
