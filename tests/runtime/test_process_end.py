"""How does a service's process end: drained, refused to start, killed, or broken?"""

import asyncio
import signal
import subprocess
import sys

import pytest

from services.runtime.clock import ManualClock, SystemClock
from services.runtime.errors import SettingsError, StartupError
from services.runtime.serve import StopAsked, run, unless_stopped

DRAINS = """
import asyncio, sys
from services.runtime.serve import run
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


LOADS = """
import asyncio, sys, time
from services.runtime.serve import run, unless_stopped
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
    with pytest.raises(StopAsked):
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


def test_a_bug_beside_a_startup_error_is_not_hidden() -> None:
    async def broken(_: asyncio.Event) -> None:
        raise BaseExceptionGroup("both", [StartupError("port"), ZeroDivisionError()])

    with pytest.raises(BaseExceptionGroup, match="both"):
        run(broken)


def test_a_bug_propagates() -> None:
    async def broken(_: asyncio.Event) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(broken)


def test_manual_time_moves_only_when_told() -> None:
    clock = ManualClock(now_ms=5, wall_ms=100)
    clock.advance(10)
    assert (clock.now_ms(), clock.wall_ms()) == (15, 110)
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_system_time_does_not_go_back() -> None:
    clock = SystemClock()
    readings = [clock.now_ms() for _ in range(1000)]
    assert readings == sorted(readings)
