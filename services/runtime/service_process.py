"""Runner of a service's process: its event loop, its stop signals, and its exit code.

signal              the first one sets the shutdown event, and the service drains. The second exits at once.
return              exit code 0, or the number that was returned.
StartupError        one line on stderr and its exit code, without a traceback.
GroupLost, EngineStuck, ReportedGone    the same at once, without waiting for threads. If another error was
                    ending the process, its line comes first and its exit code counts.
StopRequested       exit code 0, at once.
other exceptions    a bug: the traceback, exit code 1.
crash of a library  the stack of each thread on stderr.
"""

import asyncio
import faulthandler
import os
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, NoReturn, TypeVar

import uvloop

from baton.runtime.errors import EXIT_FAILED, EngineStuck, GroupLost, ReportedGone, StartupError
from baton.runtime.logging import Log

log = Log(__name__)

SHOW_CURSOR: Final = "\x1b[?25h"
ERROR_PREFIX: Final = "baton: error: "
"""Beginning of the line on stderr that reports a StartupError."""
SECOND_PREFIX: Final = "baton: as it ended: "
"""Beginning of a second error line on stderr, for an error that followed the one that ended the process."""

FILES_EVERY_S: Final = 10.0

Main = Callable[[asyncio.Event], Awaitable[int | None]]
Outcome = TypeVar("Outcome")


class StopRequested(Exception):
    """The shutdown event was set before the service had started completely. This is no error."""


def run(main: Main) -> int:
    """Run `main(shutdown)` on a new event loop until it returns. Return the process's exit code.

    `main` returns soon after `shutdown` is set, within its own drain deadline. Only the main thread can call
    this. Unexpected exceptions propagate.
    """

    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    raise_open_file_limit()

    async def with_signals() -> int | None:
        shutdown = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, number, shutdown)
        watching = asyncio.create_task(_watch_open_files())
        try:
            return await main(shutdown)
        except StopRequested:
            log.info("asked to stop before it was ready")
            _leave(0)
        except (GroupLost, EngineStuck, ReportedGone) as error:
            end_now(error)
        finally:
            watching.cancel()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(with_signals()) or 0
    except (StartupError, BaseExceptionGroup) as error:
        expected = _expected(error)
        if expected is None:
            raise
        return report_startup_error(expected)


async def unless_stopped(shutdown: asyncio.Event, starting: Awaitable[Outcome]) -> Outcome:
    """Return the result of awaiting `starting`. Raises StopRequested if `shutdown` is set first.

    A thread for which `starting` waits is abandoned then.
    """
    started, stopped = asyncio.ensure_future(starting), asyncio.create_task(shutdown.wait())
    try:
        await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            raise StopRequested
        return started.result()
    finally:
        started.cancel()
        stopped.cancel()


def report_startup_error(error: StartupError) -> int:
    """Write the error as one line to stderr. Return its exit code."""
    _write_line(ERROR_PREFIX, error)
    return error.exit_code


def end_now(error: StartupError) -> NoReturn:
    """End the process at once with the error's line and exit code, without waiting for threads.

    If another, unrelated error was already ending the process, that error's line comes first and its exit
    code counts.
    """
    before = None if error.__suppress_context__ else error.__context__
    if before is None or isinstance(before, StopRequested | asyncio.CancelledError):
        _leave(report_startup_error(error))
    code = _report_any(before)
    _write_line(SECOND_PREFIX, error)
    _leave(code)


def raise_open_file_limit() -> None:
    """Raise the limit of open files to the system's maximum, because each client's connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _watch_open_files() -> None:
    """Log a warning when no more files can be opened.

    The HTTP server counts and logs the connections that it closes for that reason (`connection_acceptor`). No
    other part that opens files does.
    """
    while True:
        await asyncio.sleep(FILES_EVERY_S)
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            log.warning(
                "new connections are closed: no more files can be opened", cause=str(error), limit=limit
            )


def _write_line(begin: str, error: StartupError) -> None:
    with suppress(OSError):  # for example a full disk
        print(f"{begin}{' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _report_any(error: BaseException) -> int:
    """Write any error to stderr: a StartupError as one line, a bug with its traceback. Return the
    exit code."""
    expected = _expected(error)
    if expected is not None:
        return report_startup_error(expected)
    with suppress(OSError):
        traceback.print_exception(error)
    return EXIT_FAILED


def _expected(error: BaseException) -> StartupError | None:
    """Return the error if it is a StartupError, or the first error of a group of StartupErrors.

    Return None for any other error, or for a group that contains one.
    """
    while isinstance(error, BaseExceptionGroup) and error.split(StartupError)[1] is None:
        error = error.exceptions[0]
    return error if isinstance(error, StartupError) else None


def _stop(number: signal.Signals, shutdown: asyncio.Event) -> None:
    if shutdown.is_set():
        if sys.stdout.isatty():
            print(SHOW_CURSOR)  # noqa: T201 - a screen that was being shown has hidden it
        _leave(128 + number)
    shutdown.set()
