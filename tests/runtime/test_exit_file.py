"""Tests of the locked file by which a worker's next process proves that the last one has ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.runtime.errors import StartupError
from baton.runtime.exit_file import RECORDS_MAX, ExitFile, ExitRecord, lock_as_rank

FIRST, SECOND = (ExitRecord("decode-0", pid, bytes([pid])) for pid in (1, 2))
HOLDER = """
import sys, time
from baton.runtime.exit_file import ExitFile, ExitRecord, lock_as_rank
if sys.argv[2] == "rank":
    file = lock_as_rank(sys.argv[1])
else:
    ExitFile(sys.argv[1]).leave([ExitRecord("decode-0", 1, bytes([1]))])
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "exit")


@contextmanager
def holder(path: str, what: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process, which holds the file's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, path, what], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.wait()


def left(path: str, *records: ExitRecord) -> None:
    with ExitFile(path) as file:
        file.leave(records)


def test_the_next_process_finds_what_the_last_one_left_until_it_is_reported(path: str) -> None:
    left(path, FIRST)
    with ExitFile(path) as file:
        assert file.previous == [FIRST]
        file.leave([SECOND])
    with ExitFile(path) as file:
        assert file.previous == [FIRST, SECOND], "nobody has reported the first yet"
        file.reported(FIRST)
    with ExitFile(path) as file:
        assert file.previous == [SECOND]


def test_an_exit_that_could_not_be_reported_is_left_to_the_next_process(path: str) -> None:
    with ExitFile(path) as file:
        file.leave([FIRST])
        file.retain(FIRST)
        file.leave([SECOND])
        assert file.previous == [FIRST]
    with ExitFile(path) as file:
        assert file.previous == [FIRST, SECOND]


def test_retained_records_are_bounded(path: str) -> None:
    with ExitFile(path) as file:
        for number in range(RECORDS_MAX + 3):
            file.retain(ExitRecord("decode-0", number, b"secret"))
        assert [each.pid for each in file.previous] == list(range(3, RECORDS_MAX + 3))


@pytest.mark.parametrize("what", ["worker", "rank"])
def test_exit_by_starter_a_process_that_is_stopped_keeps_its_lock_and_one_that_is_killed_does_not(
    path: str, what: str
) -> None:
    left(path)
    with holder(path, what) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(StartupError, match="another process of this worker runs, or is stopped"):
            ExitFile(path, lock_s=0.0)
        process.kill()
        with ExitFile(path) as file:
            assert file.previous == ([FIRST] if what == "worker" else [])


def test_ranks_lock_it_together(path: str) -> None:
    files = [lock_as_rank(path) for _ in range(2)]
    with pytest.raises(StartupError):
        ExitFile(path, lock_s=0.0)
    for each in files:
        os.close(each)
    ExitFile(path, lock_s=0.0).__exit__(None, None, None)


def test_exit_by_starter_what_another_boot_has_left_proves_nothing(path: str) -> None:
    """The file may be on a disk that another machine has, too."""
    left(path, FIRST)
    content = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**content, "boot": "of another machine"}))
    with ExitFile(path) as file:
        assert file.previous == []


@pytest.mark.parametrize("text", ["{", "[]", '{"boot": 1}', "\0" * 70_000])
def test_what_cannot_be_read_proves_nothing(path: str, text: str) -> None:
    Path(path).write_text(text)
    with ExitFile(path) as file:
        assert file.previous == []
        file.leave([SECOND])
    with ExitFile(path) as file:
        assert file.previous == [SECOND]


def test_it_is_bounded_and_for_its_owner_alone(path: str) -> None:
    for number in range(RECORDS_MAX + 3):
        left(path, ExitRecord("decode-0", number, b"secret"))
    with ExitFile(path) as file:
        assert [each.pid for each in file.previous] == list(range(3, RECORDS_MAX + 3))
    assert Path(path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["/no/such/directory/exit", "/proc/self/exit"])
def test_an_unusable_file_is_refused(path: str) -> None:
    with pytest.raises(StartupError, match="cannot be used"):
        ExitFile(path)


def test_a_link_is_not_followed(tmp_path: Path, path: str) -> None:
    target = tmp_path / "target"
    target.touch()
    Path(path).symlink_to(target)
    with pytest.raises(StartupError, match="cannot be used"):
        ExitFile(path)
