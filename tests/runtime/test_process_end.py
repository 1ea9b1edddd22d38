"""Tests of the end of a service's process: drained, refused to start, killed, or broken."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.runtime.clock import SystemClock
from baton.runtime.errors import SettingsError, StartupError
from baton.runtime.service_process import StopRequested, run, unless_stopped
from tests.support.manual_clock import ManualClock

DRAINS = """
import asyncio, sys
from baton.runtime.service_process import run
async def main(shutdown):
    print("up", flush=True)
    await shutdown.wait()
    print("draining", flush=True)
    await asyncio.sleep(0 if sys.argv[1] == "quick" else 600)
    print("drained", flush=True)
    return 0
sys.exit(run(main))
"""


def _start(mode: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", DRAINS, mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_ends_with_0(number: signal.Signals) -> None:
    with _start("quick") as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert out == "draining\ndrained\n"
    assert process.returncode == 0


def test_the_second_signal_ends_at_once() -> None:
    with _start("slow") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 128 + signal.SIGINT
        assert process.stdout.read() == ""


MANY = """
import os, resource, sys
from baton.runtime.service_process import run
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
async def main(shutdown):
    for _ in range(100): os.dup(0)
sys.exit(run(main))
"""


def test_a_process_may_have_as_many_connections_as_the_system_lets_it() -> None:
    """A shell's limit is meant for select(). Each client and each peer is an open file."""
    with Path("/dev/null").open() as nothing:
        process = subprocess.run([sys.executable, "-c", MANY], stdin=nothing, timeout=30, check=False)
    assert process.returncode == 0


FULL = """
import asyncio, os, resource, sys
from baton.runtime import logging, service_process
logging.configure("info", "text")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
service_process.FILES_EVERY_S = 0.01
async def main(shutdown):
    await asyncio.sleep(0.05)
    held = []
    try:
        while True: held.append(os.dup(2))
    except OSError: pass
    await asyncio.sleep(0.5)
sys.exit(service_process.run(main))
"""


def test_connections_refused_for_lack_of_files_are_logged() -> None:
    process = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, timeout=30, check=False
    )
    assert process.returncode == 0
    assert "WARNING baton.runtime.service_process new connections are closed" in process.stderr
    assert process.stderr.splitlines()[0].endswith(" limit=64")


LOADS = """
import asyncio, sys, time
from baton.runtime.service_process import run, unless_stopped
def load():
    print("loading", flush=True)
    time.sleep(600)
async def main(shutdown):
    try:
        await unless_stopped(shutdown, asyncio.get_running_loop().run_in_executor(None, load))
    finally:
        print("closed")
sys.exit(run(main))
"""


def test_a_signal_while_something_is_loaded_ends_with_0_and_waits_for_no_thread() -> None:
    with subprocess.Popen([sys.executable, "-c", LOADS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert process.stdout.read() == "closed\n"


async def test_what_is_not_stopped_returns_or_raises_by_itself() -> None:
    async def fails() -> None:
        raise StartupError("too little memory")

    shutdown = asyncio.Event()
    assert await unless_stopped(shutdown, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(StartupError, match="too little memory"):
        await unless_stopped(shutdown, fails())


async def test_what_is_stopped_is_cancelled() -> None:
    shutdown, waiting = asyncio.Event(), asyncio.get_running_loop().create_future()
    shutdown.set()
    with pytest.raises(StopRequested):
        await unless_stopped(shutdown, waiting)
    assert waiting.cancelled()


def test_a_startup_error_is_one_line_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    async def refused(_: asyncio.Event) -> int:
        raise StartupError("the model directory /m is missing:\n give another with --model")

    assert run(refused) == 1
    assert capsys.readouterr().err == (
        "baton: error: the model directory /m is missing: give another with --model\n"
    )


def test_a_startup_error_in_a_task_group_is_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse() -> None:
        raise SettingsError("port 1 is taken")

    async def refused(_: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(refuse())

    assert run(refused) == 2
    assert capsys.readouterr().err == "baton: error: port 1 is taken\n"


ENDS = """
import sys, threading
from baton.runtime.errors import *
from baton.runtime.service_process import StopRequested, run
stuck = threading.Thread(target=threading.Event().wait)
async def main(shutdown):
    try:
        stuck.start()
        {}
    finally:
        raise EngineStuck("a step has not ended")
sys.exit(run(main))
"""
STUCK = "baton: error: a step has not ended\n"
STUCK_BESIDES = "baton: as it ended: a step has not ended\n"


def ended(by: str) -> tuple[int, str]:
    """Return exit code and stderr of a process with a thread that does not end.

    `by`: the error that ends it, followed by one about a stuck step.
    """
    process = subprocess.run(
        [sys.executable, "-c", ENDS.format(by)], capture_output=True, text=True, timeout=30, check=False
    )
    return process.returncode, process.stderr


@pytest.mark.parametrize("by", ["return 0", "raise StopRequested"])
def test_a_step_that_is_stuck_at_the_end_is_one_line_at_once(by: str) -> None:
    assert ended(by) == (1, STUCK)


@pytest.mark.parametrize("bug", ["ZeroDivisionError", "ExceptionGroup('two', [ZeroDivisionError()])"])
def test_a_bug_is_not_hidden_by_a_step_that_is_stuck_as_it_ends_the_process(bug: str) -> None:
    code, told = ended(f"raise {bug}")
    assert code == 1
    assert "Traceback (most recent call last)" in told
    assert "ZeroDivisionError\n" in told
    assert told.endswith(STUCK_BESIDES)
    assert "EngineStuck" not in told


@pytest.mark.parametrize("group", ["{}", "ExceptionGroup('one', [{}])"])
def test_a_startup_error_has_its_line_and_code_though_a_step_is_stuck_as_well(group: str) -> None:
    refused = group.format("SettingsError('port 1 is taken')")
    assert ended(f"raise {refused}") == (2, f"baton: error: port 1 is taken\n{STUCK_BESIDES}")


@pytest.mark.parametrize("by", ["print('not flushed yet')", "raise ZeroDivisionError"])
def test_a_step_that_is_stuck_ends_the_process_where_nothing_can_be_written(by: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", ENDS.format(by)]
        assert subprocess.run(command, stdout=full, stderr=full, timeout=30, check=False).returncode == 1


CAUSED = """
import sys
from baton.runtime.errors import GroupLost
from baton.runtime.service_process import run
async def main(shutdown):
    try:
        raise ConnectionError("reset")
    except ConnectionError as error:
        raise GroupLost("rank 1: gone") from error
sys.exit(run(main))
"""


def test_what_a_lost_group_was_caused_by_is_in_its_own_words() -> None:
    process = subprocess.run(
        [sys.executable, "-c", CAUSED], capture_output=True, text=True, timeout=30, check=False
    )
    assert (process.returncode, process.stderr) == (3, "baton: error: rank 1: gone\n")


def test_a_startup_error_hides_no_bug() -> None:
    async def broken(_: asyncio.Event) -> None:
        raise BaseExceptionGroup("both", [StartupError("port"), ZeroDivisionError()])

    with pytest.raises(BaseExceptionGroup, match="both"):
        run(broken)


def test_a_bug_propagates() -> None:
    async def broken(_: asyncio.Event) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(broken)


def test_manual_time_moves_only_by_its_own_calls() -> None:
    clock = ManualClock(now_ms=5, wall_ms=100)
    clock.advance(10)
    assert (clock.now_ms(), clock.wall_ms()) == (15, 110)
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_system_time_does_not_go_back() -> None:
    clock = SystemClock()
    readings = [clock.now_ms() for _ in range(1000)]
    assert readings == sorted(readings)
