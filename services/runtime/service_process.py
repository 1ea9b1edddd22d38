"""How does a service's process run, stop, and end when it cannot start?

signal              first: the shutdown event is set, the service drains;  second: exit at once
returns             exit code 0, or the number it returned
StartupError        one line on stderr, its exit code, no traceback
GroupLost, EngineStuck, ReportedGone    the same, at once: no thread is waited for; raised while something
                    else was ending the process, that one is told as it would have been, and has its code
StopRequested           exit code 0, at once as well
anything else       a bug: the traceback, exit code 1
a crash of a library    where each thread was, on stderr
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
TOLD: Final = "baton: error: "
"""How the one line begins."""
BESIDES: Final = "baton: as it ended: "
"""And another one behind it, which is not why."""

FILES_EVERY_S: Final = 10.0

Main = Callable[[asyncio.Event], Awaitable[int | None]]
Outcome = TypeVar("Outcome")


class StopRequested(Exception):
    """The shutdown event was set before everything was up. Not an error."""


def run(main: Main) -> int:
    """Run `main(shutdown)` on a fresh event loop until it returns. Returns the exit code.

    `main` returns soon after `shutdown` is set, within its own drain deadline. Only the main thread can
    call this. Unexpected exceptions propagate.
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
        return tell(expected)


async def unless_stopped(shutdown: asyncio.Event, starting: Awaitable[Outcome]) -> Outcome:
    """Return what `starting` returns. Raises StopRequested if `shutdown` is set first.

    A thread that `starting` waits for is left behind.
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


def tell(error: StartupError) -> int:
    """Write the error's one line to stderr. Returns the exit code."""
    _say(TOLD, error)
    return error.exit_code


def end_now(error: StartupError) -> NoReturn:
    """End the process with the error's line and code, whatever its threads are doing. Where it was raised
    while another one, which is not its cause, was on its way out, that one's words come first, with its code.
    """
    before = None if error.__suppress_context__ else error.__context__
    if before is None or isinstance(before, StopRequested | asyncio.CancelledError):
        _leave(tell(error))
    code = _tell_any(before)
    _say(BESIDES, error)
    _leave(code)


def raise_open_file_limit() -> None:
    """As many as the system lets this process have, and not as a shell does: each client is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _watch_open_files() -> None:
    """HTTP counts and tells whom it hangs up on (`http_accept`); nothing else that opens files says so."""
    while True:
        await asyncio.sleep(FILES_EVERY_S)
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            log.warning(
                "who connects is hung up on: no more files can be open", cause=str(error), limit=limit
            )


def _say(begin: str, error: StartupError) -> None:
    with suppress(OSError):  # a full disk, say
        print(f"{begin}{' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _tell_any(error: BaseException) -> int:
    """As `tell`; of a bug the traceback."""
    expected = _expected(error)
    if expected is not None:
        return tell(expected)
    with suppress(OSError):
        traceback.print_exception(error)
    return EXIT_FAILED


def _expected(error: BaseException) -> StartupError | None:
    """The error itself, or the first of a group of such; None where there is a bug in it."""
    while isinstance(error, BaseExceptionGroup) and error.split(StartupError)[1] is None:
        error = error.exceptions[0]
    return error if isinstance(error, StartupError) else None


def _stop(number: signal.Signals, shutdown: asyncio.Event) -> None:
    if shutdown.is_set():
        if sys.stdout.isatty():
            print(SHOW_CURSOR)  # noqa: T201 - whoever waits on a screen has hidden it
        _leave(128 + number)
    shutdown.set()
