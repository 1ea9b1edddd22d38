"""Tests of a stack of which a part ends at the start, ends later, or does not stop."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from baton.launch.stack_plan import StackCommand
from baton.launch.supervisor import PartDied, Supervisor
from baton.runtime.service_process import StopRequested
from tests.launch.stand_ins import PATIENCE_S, Parts, eventually, gone
from tests.support.manual_clock import ManualClock

BOOTSTRAP = StackCommand("bootstrap", "bootstrap", ())
PREFILL = StackCommand("prefill", "prefill-0", ())
DECODE = StackCommand("decode", "decode-0", ())
ALL = [BOOTSTRAP, PREFILL, DECODE]
GROUPS = [[BOOTSTRAP], [PREFILL, DECODE]]
LONG_MS = int(PATIENCE_S * 1000)


async def never() -> bool:
    return False


async def running(parts: Parts) -> tuple[Supervisor, asyncio.Event, asyncio.Task[None]]:
    """Return the supervisor of a running stack of three parts."""
    supervisor, shutdown = parts.supervisor(), asyncio.Event()
    await supervisor.start(ALL, parts.up("bootstrap", "prefill-0", "decode-0"), LONG_MS, shutdown)
    return supervisor, shutdown, asyncio.create_task(supervisor.keep(shutdown))


async def stop(supervisor: Supervisor, shutdown: asyncio.Event, kept: asyncio.Task[None]) -> bool:
    shutdown.set()
    await kept
    return await supervisor.stop(GROUPS, LONG_MS)


async def test_a_part_that_refuses_to_start_ends_everything_with_its_own_words(parts: Parts) -> None:
    parts.behaviour["prefill-0"] = "refuses"
    supervisor = parts.supervisor()
    with pytest.raises(PartDied, match=r"^prefill-0: too little memory: lower --kv-cache-memory$"):
        await supervisor.start(ALL, never, LONG_MS, asyncio.Event())
    assert await supervisor.stop(GROUPS, LONG_MS)
    assert all(gone(child.pid) for child in parts.children)
    assert parts.shown == []


async def test_a_part_that_crashes_at_start_shows_its_last_lines(parts: Parts) -> None:
    parts.behaviour["decode-0"] = "crashes"
    supervisor = parts.supervisor()
    with pytest.raises(PartDied, match=r"^decode-0 ended with exit code 1 before it was ready$"):
        await supervisor.start(ALL, never, LONG_MS, asyncio.Event())
    assert parts.shown[-1] == "decode-0: ZeroDivisionError: a bug at start"
    await supervisor.stop(GROUPS, LONG_MS)
    assert all(gone(child.pid) for child in parts.children)


async def test_a_part_that_is_never_ready_is_an_error_after_the_time_out(parts: Parts) -> None:
    clock = ManualClock()
    supervisor = Supervisor(parts.start, parts.report_exit, parts.shown.append, clock)

    async def not_yet() -> bool:
        clock.advance(1_000)
        return False

    with pytest.raises(PartDied, match=r"prefill-0, decode-0 not ready after 3 s \(--ready-timeout-ms\)"):
        await supervisor.start([PREFILL, DECODE], not_yet, 3_000, asyncio.Event())
    await supervisor.stop(GROUPS, LONG_MS)


async def test_a_stop_while_starting_is_not_an_error(parts: Parts) -> None:
    supervisor, shutdown = parts.supervisor(), asyncio.Event()
    shutdown.set()
    with pytest.raises(StopRequested):
        await supervisor.start(ALL, never, LONG_MS, shutdown)
    await supervisor.stop(GROUPS, LONG_MS)
    assert all(gone(child.pid) for child in parts.children)


async def test_a_worker_that_dies_later_is_reported_and_started_again_at_once(parts: Parts) -> None:
    supervisor, shutdown, kept = await running(parts)
    victim = parts.children[2]
    os.kill(victim.pid, signal.SIGKILL)
    await eventually(lambda: parts.journal.count("decode-0 up") == 2)

    assert parts.reported == [("decode-0", victim.pid)]
    assert parts.secrets == [victim.exit_secret]
    assert parts.shown == ["decode-0 was killed by SIGKILL: starting it again at once"]
    assert len(parts.children) == 4
    assert await stop(supervisor, shutdown, kept)
    assert all(gone(child.pid) for child in parts.children)


async def test_exit_by_starter_the_end_of_a_launcher_is_not_reported_for_its_ranks(parts: Parts) -> None:
    supervisor, shutdown, kept = await running(parts)
    victim = parts.children[2]
    victim.exit_secret = b""
    os.kill(victim.pid, signal.SIGKILL)
    await eventually(lambda: parts.journal.count("decode-0 up") == 2)
    assert await stop(supervisor, shutdown, kept)
    assert parts.reported == []


async def test_a_worker_that_dies_again_and_again_waits_longer_each_time(parts: Parts) -> None:
    supervisor, shutdown, kept = await running(parts)
    parts.behaviour["prefill-0"] = "refuses"
    os.kill(parts.children[1].pid, signal.SIGKILL)
    await eventually(lambda: len(parts.shown) >= 3)
    del parts.behaviour["prefill-0"]

    why = "prefill-0 ended with exit code 1 (too little memory: lower --kv-cache-memory)"
    assert parts.shown[0].endswith("at once")
    assert parts.shown[1:3] == [f"{why}: starting it again in 0.0{each} s" for each in (1, 2)]
    await stop(supervisor, shutdown, kept)


async def test_a_report_that_cannot_be_made_does_not_keep_the_worker_away(parts: Parts) -> None:
    supervisor, shutdown, kept = await running(parts)
    parts.report_error = ConnectionError("nobody there")
    os.kill(parts.children[1].pid, signal.SIGKILL)
    await eventually(lambda: parts.journal.count("prefill-0 up") == 2)
    assert len(parts.reported) < 5, "the worker waits for none of the tries"

    await eventually(lambda: len(parts.shown) == 2)
    assert len(parts.reported) == 5
    assert "could not be told that prefill-0 ended (ConnectionError: nobody there)" in parts.shown[-1]
    await stop(supervisor, shutdown, kept)


async def test_a_bootstrap_that_dies_later_is_started_again(parts: Parts) -> None:
    supervisor, shutdown, kept = await running(parts)
    os.kill(parts.children[0].pid, signal.SIGKILL)
    await eventually(lambda: parts.journal.count("bootstrap up") == 2)

    assert parts.reported == []
    await stop(supervisor, shutdown, kept)


async def test_the_bootstrap_has_ended_before_a_worker_gets_the_stop_signal(parts: Parts) -> None:
    parts.behaviour["bootstrap"] = "slow"
    supervisor, shutdown, kept = await running(parts)
    assert await stop(supervisor, shutdown, kept)

    stopped = [line for line in parts.journal if not line.endswith(" up")]
    assert stopped[:2] == ["bootstrap asked", "bootstrap ended"]
    assert sorted(stopped[2:]) == ["decode-0 asked", "decode-0 ended", "prefill-0 asked", "prefill-0 ended"]


async def test_a_part_that_does_not_stop_is_killed_with_a_line(parts: Parts) -> None:
    parts.behaviour["decode-0"] = "deaf"
    supervisor, shutdown, kept = await running(parts)
    shutdown.set()
    await kept
    assert not await supervisor.stop(GROUPS, timeout_ms=200)
    assert parts.shown == ["decode-0 did not stop within 0.2 s: killing it"]
    assert all(gone(child.pid) for child in parts.children)


async def test_nothing_is_started_again_while_stopping(parts: Parts) -> None:
    supervisor, shutdown, kept = await running(parts)
    await stop(supervisor, shutdown, kept)
    assert len(parts.children) == 3
    assert parts.shown == []


ORPHANS = """
import asyncio, os, sys
from baton.launch.child import start_child
async def main():
    sleeps = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    tell = lambda _: print(child.pid, flush=True)
    child = await start_child("c", sleeps, dict(os.environ), lambda _: True, tell)
    await child.wait()
asyncio.run(main())
"""


async def test_children_die_with_a_supervisor_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert not gone(child)
        supervisor.kill()
        supervisor.wait(PATIENCE_S)
        await eventually(lambda: gone(child))
