"""Report of a worker process's exit to all bootstraps, made by the next process if no supervisor makes it.

With `--exit-file` a process draws a secret for its own exit and stores it. The next process gets the lock of
the file once this one has ended, and reports the exit (`baton.runtime.exit_file`).
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

from baton.runtime.errors import StartupError, describe_error
from baton.runtime.exit_file import ExitFile, ExitRecord, lock_as_rank
from baton.runtime.logging import Log
from baton.runtime.worker_settings import WorkerSettings
from baton.wire.errors import RemoteError
from baton.wire.receiver_secret import digest_of, draw_secret
from baton.worker.lifecycle.lazy_exit_report import ReportExit, reporter

log = Log(__name__)

Settings = TypeVar("Settings", bound=WorkerSettings)
PAUSE_S: Final = 2.0
TRIES: Final = 300
"""Most attempts to report one exit, which take ten minutes. A bootstrap that starts later than that knows no
worker that has ended before."""


class ExitReporter:
    """Owner of a process's exit file. It stores the secret with which this process's exit is reported, and
    reports the exits of earlier processes."""

    def __init__(self, file: ExitFile | None = None) -> None:
        self._file = file
        self._reporting: asyncio.Task[None] | None = None

    @classmethod
    def prepare(cls, settings: Settings, names: Sequence[str]) -> "tuple[ExitReporter, Settings]":
        """Lock the exit file, and store a new secret in it. Return the reporter, and the settings with the
        digest of the secret.

        `names`: names under which the process registers. Raises StartupError.
        """
        if not settings.exit_file:
            return cls(), settings
        if settings.grouped:
            lock_as_rank(settings.exit_file)  # until this process ends
            return cls(), settings
        file, secret = ExitFile(settings.exit_file), draw_secret()
        file.leave(ExitRecord(name, os.getpid(), secret) for name in names)
        return cls(file), replace(settings, exit_file="", exit_digest=digest_of(secret).hex())

    def begin(self, settings: WorkerSettings) -> None:
        """Start a task that reports the exits of earlier processes."""
        if self._file is not None:
            report = reporter(settings.bootstrap, settings.tls, settings.run_token)
            self._reporting = asyncio.create_task(report_previous(self._file, report))

    async def end(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)


async def report_previous(
    file: ExitFile, report: ReportExit, pause_s: float = PAUSE_S, tries: int = TRIES
) -> None:
    """Report the exit of each earlier process in the file. Each report is repeated until all bootstraps have
    answered. A refusal counts as an answer, and is logged.

    `pause_s`: seconds between two attempts. `tries`: most attempts for each exit.
    """
    for record in list(file.previous):
        for _ in range(tries):
            try:
                await report(record.name, record.pid, record.secret)
            except RemoteError as error:
                if error.unreachable:
                    await asyncio.sleep(pause_s)
                    continue
                log.warning("the exit of the last process was not believed", cause=describe_error(error))
            else:
                log.info("the exit of the last process was reported", worker=record.name, pid=record.pid)
            try:
                file.reported(record)
            except StartupError as error:  # the next process reports it again, and is refused
                log.warning("a reported exit stays in its file", cause=str(error))
            break
