"""Tests of the reports of a worker's earlier processes, whose exits its next process reports."""

from pathlib import Path

import grpc
import pytest

from baton.decode.settings import DecodeSettings
from baton.runtime.errors import SettingsError, StartupError
from baton.runtime.exit_file import ExitFile, ExitRecord
from baton.wire.errors import RemoteError
from baton.wire.receiver_secret import digest_of
from baton.worker.lifecycle.exit_reporter import ExitReporter, report_previous

RECORDS = [ExitRecord("decode-0", pid, bytes([pid])) for pid in (1, 2)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "exit")


async def reported(path: str, *errors: RemoteError) -> list[tuple[str, int, bytes]]:
    """Return the reports that were made of RECORDS when the first reports fail with `errors`."""
    with ExitFile(path) as file:
        file.leave(RECORDS)
    told: list[tuple[str, int, bytes]] = []
    failing = list(errors)

    async def report(name: str, pid: int, secret: bytes) -> None:
        told.append((name, pid, secret))
        if failing:
            raise failing.pop(0)

    with ExitFile(path) as file:
        await report_previous(file, report, pause_s=0.0, tries=3)
    return told


async def test_each_is_reported_once_and_forgotten(path: str) -> None:
    assert await reported(path) == [("decode-0", 1, b"\1"), ("decode-0", 2, b"\2")]
    with ExitFile(path) as file:
        assert file.previous == []


async def test_a_refusal_is_an_answer(path: str) -> None:
    refused = RemoteError(grpc.StatusCode.FAILED_PRECONDITION, "NotGone", "it answers")
    assert [pid for _, pid, _ in await reported(path, refused)] == [1, 2]
    with ExitFile(path) as file:
        assert file.previous == []


async def test_a_bootstrap_that_is_not_there_is_asked_again_and_not_for_ever(path: str) -> None:
    away = RemoteError(grpc.StatusCode.UNAVAILABLE, "", "nobody there")
    assert [pid for _, pid, _ in await reported(path, away)] == [1, 1, 2]
    with ExitFile(path) as file:
        assert file.previous == []
    assert [pid for _, pid, _ in await reported(path, *[away] * 3)] == [1, 1, 1, 2]
    with ExitFile(path) as file:
        assert file.previous == RECORDS[:1], "the next process tries again"


async def test_the_process_registers_the_digest_of_what_it_leaves(path: str) -> None:
    own, settings = ExitReporter.prepare(DecodeSettings(name="decode-0", exit_file=path), ("decode-0",))
    with pytest.raises(StartupError):
        ExitFile(path, lock_s=0.0)
    del own
    content = Path(path).read_text()
    secret = content.split('"secret": "')[1].split('"')[0]
    assert settings.exit_digest == digest_of(bytes.fromhex(secret)).hex()
    assert settings.exit_digest not in content


def test_a_rank_leaves_nothing_and_has_its_launchers_digest(path: str) -> None:
    given = DecodeSettings(tp=2, rank=1, rendezvous="127.0.0.1:1", exit_file=path, exit_digest="0" * 64)
    _, settings = ExitReporter.prepare(given, ("decode-0",))
    assert settings is given
    with pytest.raises(StartupError, match="another process"):
        ExitFile(path, lock_s=0.0)


def test_flags_that_do_not_go_together_are_refused(path: str) -> None:
    with pytest.raises(SettingsError, match="its starter reports the exit"):
        DecodeSettings(exit_file=path, exit_digest="0" * 64)
    with pytest.raises(SettingsError, match="may outlive these"):
        DecodeSettings(tp=2, machines=2, machine=0, rendezvous="127.0.0.1:1", exit_file=path)


async def test_a_disk_that_is_full_ends_no_reports(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: ExitFile, __: ExitRecord) -> None:
        raise StartupError("no space left")

    monkeypatch.setattr(ExitFile, "reported", full)
    assert [pid for _, pid, _ in await reported(path)] == [1, 2]
