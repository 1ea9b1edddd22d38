"""A locked file by which a worker's next process proves that the previous one has ended.

A worker's process locks the file for as long as it lives. In the file it leaves the data that a report of its
exit needs. The kernel gives the lock to the next process once the previous one has ended. A process that is
only stopped keeps it.

The next process reports the exit (`exit-by-starter`), because a platform that restarts workers reports none.
Records from before the host's last boot prove nothing, because the file may lie on a shared disk.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from baton.runtime.errors import StartupError, describe_error
from baton.runtime.logging import Log

log = Log(__name__)

LOCK_S: Final = 10.0
"""Longest wait for the previous process to end and release the lock, in seconds."""
POLL_S: Final = 0.05
RECORDS_MAX: Final = 16
"""Most records of exits that are still to be reported. The newest stay."""
BYTES_MAX: Final = 65_536
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
RANKS: Final = ".ranks"


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """Data that a report of one process's exit needs: worker name, process id and secret."""

    name: str
    """Name of the worker to which the process belonged."""
    pid: int
    secret: bytes


class ExitFile:
    """Exit file of one worker on this host. This process holds its lock until it ends or closes it."""

    def __init__(self, path: str, lock_s: float = LOCK_S) -> None:
        """Open and lock the file. Raises StartupError if another process has the lock, or the file cannot be
        used.

        `lock_s`: longest wait for the lock, in seconds.
        """
        self._path = path
        self._file = _open(path)
        try:
            _lock(self._file, path, lock_s)
            ranks = _open(path + RANKS)
            try:
                _lock(ranks, path, lock_s)  # no rank of an earlier launcher is left
            finally:
                os.close(ranks)
        except BaseException:
            os.close(self._file)
            raise
        self._boot = BOOT_ID.read_text().strip()
        self.previous: list[ExitRecord] = self._read()
        """Records of earlier processes that have ended and whose exit has not been reported yet, the newest
        last."""
        self._own: list[ExitRecord] = []

    def __enter__(self) -> "ExitFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def leave(self, own: Iterable[ExitRecord]) -> None:
        """Write the records of the processes that run now to the file, for the next process. Raises
        StartupError."""
        self._own = list(own)
        self._write()

    def retain(self, record: ExitRecord) -> None:
        """Keep the record of an ended process in the file, so that the next process reports its exit.

        It is for an exit that could not be reported. It stays beside the records that `leave` writes later.
        Raises StartupError.
        """
        self._own = [each for each in self._own if each != record]
        self.previous = [*self.previous, record][-RECORDS_MAX:]
        self._write()

    def reported(self, record: ExitRecord) -> None:
        """Remove a record from the file, after the bootstrap has answered the report of its exit. Raises
        StartupError."""
        self.previous = [each for each in self.previous if each != record]
        self._write()

    def _read(self) -> list[ExitRecord]:
        text = os.pread(self._file, BYTES_MAX, 0)
        if not text:
            return []
        try:
            content = json.loads(text)
            if content["boot"] != self._boot:
                return []
            return [
                ExitRecord(str(each["name"]), int(each["pid"]), bytes.fromhex(each["secret"]))
                for each in content["processes"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            log.warning("no exit of a last process is reported", file=self._path, cause=describe_error(error))
            return []

    def _write(self) -> None:
        records = (self.previous + self._own)[-RECORDS_MAX:]
        processes = [{**asdict(each), "secret": each.secret.hex()} for each in records]
        text = json.dumps({"boot": self._boot, "processes": processes}).encode()
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)
        except OSError as error:
            raise _unusable(self._path, error) from error


def lock_as_rank(path: str) -> int:
    """Lock the exit file as one of a worker's ranks, for as long as this rank lives.

    A later launcher then cannot report this rank as ended. Return the open file. Raises StartupError.
    """
    file = _open(path + RANKS)
    try:
        _lock(file, path, LOCK_S, fcntl.LOCK_SH)
    except BaseException:
        os.close(file)
        raise
    return file


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error


def _lock(file: int, path: str, lock_s: float, how: int = fcntl.LOCK_EX) -> None:
    until_s = time.monotonic() + lock_s
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise StartupError(
                    f"--exit-file {path}: another process of this worker runs, or is stopped: end it first"
                ) from None
            time.sleep(POLL_S)
        except OSError as error:
            raise _unusable(path, error) from error
        else:
            return


def _unusable(path: str, error: OSError) -> StartupError:
    return StartupError(f"--exit-file {path} cannot be used ({error.strerror}): give a file on a local disk")
