"""Tests of the output of child processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from baton.launch.child import LINE_BYTES_MAX, LINES_KEPT, Child, describe_exit, lines, start_child


async def _ran(script: str, said: list[str], worth: bool = True) -> tuple[Child, int]:
    child = await start_child(
        "part", (sys.executable, "-c", script), dict(os.environ), lambda _: worth, said.append
    )
    return child, await child.wait()


async def test_lines_of_both_streams_are_prefixed() -> None:
    said: list[str] = []
    _, code = await _ran("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", said)
    assert said == ["part: out", "part: err"]
    assert code == 3


async def test_hidden_lines_are_bounded_and_can_be_shown() -> None:
    said: list[str] = []
    child, _ = await _ran("for i in range(100): print(i)", said, worth=False)
    assert said == []
    child.show_hidden_lines()
    assert said == [f"part: {i}" for i in range(100 - LINES_KEPT, 100)]


async def test_of_a_crash_every_line_is_shown() -> None:
    said: list[str] = []
    script = "import faulthandler, os; print('before'); faulthandler.enable(); os.abort()"
    _, code = await _ran(script, said, worth=False)
    assert code == -signal.SIGABRT
    assert said[0] == "part: Fatal Python error: Aborted"
    assert any('File "<string>", line 1 in <module>' in line for line in said)


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
    said: list[str] = []
    _, code = await _ran("import baton.cli; print('right')", said)
    assert (said, code) == (["part: right"], 0)


async def test_a_child_is_not_in_the_terminals_process_group() -> None:
    said: list[str] = []
    await _ran("import os; print(os.getpgid(0) == os.getpid())", said)
    assert said == ["part: True"]


def test_an_end_is_described_by_code_or_signal() -> None:
    assert describe_exit(2) == "ended with exit code 2"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-64) == "was killed by SIGRTMAX"
    assert describe_exit(-99) == "was killed by signal 99"
