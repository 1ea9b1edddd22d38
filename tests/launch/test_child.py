"""Tests of the output of child processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from baton.launch.child import HIDDEN_LINES_MAX, LINE_BYTES_MAX, Child, describe_exit, lines, start_child


async def _ran(script: str, shown: list[str], worth: bool = True) -> tuple[Child, int]:
    child = await start_child(
        "part", (sys.executable, "-c", script), dict(os.environ), lambda _: worth, shown.append
    )
    return child, await child.wait()


async def test_lines_of_both_streams_are_prefixed() -> None:
    shown: list[str] = []
    _, code = await _ran("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", shown)
    assert shown == ["part: out", "part: err"]
    assert code == 3


async def test_hidden_lines_are_bounded_and_can_be_shown() -> None:
    shown: list[str] = []
    child, _ = await _ran("for i in range(100): print(i)", shown, worth=False)
    assert shown == []
    child.show_hidden_lines()
    assert shown == [f"part: {i}" for i in range(100 - HIDDEN_LINES_MAX, 100)]


async def test_of_a_crash_every_line_is_shown() -> None:
    shown: list[str] = []
    script = "import faulthandler, os; print('before'); faulthandler.enable(); os.abort()"
    _, code = await _ran(script, shown, worth=False)
    assert code == -signal.SIGABRT
    assert shown[0] == "part: Fatal Python error: Aborted"
    assert any('File "<string>", line 1 in <module>' in line for line in shown)


async def test_overlong_lines_and_bad_bytes_do_not_stop_the_reading() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"x" * 1_000_000 + b"\nnext \xff\r\nlast")
    reader.feed_eof()
    assert [line async for line in lines(reader)] == ["x" * LINE_BYTES_MAX, "next �", "last"]


async def test_a_child_runs_this_package_whatever_the_current_directory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("services", "baton"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    _, code = await _ran("import baton.cli; print('right')", shown)
    assert (shown, code) == (["part: right"], 0)


async def test_a_child_is_not_in_the_terminals_process_group() -> None:
    shown: list[str] = []
    await _ran("import os; print(os.getpgid(0) == os.getpid())", shown)
    assert shown == ["part: True"]


def test_an_end_is_described_by_code_or_signal() -> None:
    assert describe_exit(2) == "ended with exit code 2"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-64) == "was killed by SIGRTMAX"
    assert describe_exit(-99) == "was killed by signal 99"
