"""How does a service's process run, stop, and end when it cannot start?

signal              first: the shutdown event is set, the service drains;  second: exit at once
returns             exit code 0, or the number it returned
StartupError        one line on stderr, its exit code, no traceback
GroupLost           the same, at once: no thread is waited for
anything else       a bug: the traceback, exit code 1
a crash of a library    where each thread was, on stderr
"""

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import uvloop

from services.runtime.errors import GroupLost, StartupError

TOLD: Final = "baton: error: "
"""How the one line begins."""

Main = Callable[[asyncio.Event], Awaitable[int | None]]


def run(main: Main) -> int:
    """Run `main(shutdown)` on a fresh event loop until it returns. Returns the exit code.

    `main` returns soon after `shutdown` is set, within its own drain deadline. Only the main thread can
    call this. Unexpected exceptions propagate.
    """

    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)

    async def with_signals() -> int | None:
        shutdown = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, number, shutdown)
        try:
            return await main(shutdown)
        except GroupLost as error:
            end_now(error)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(with_signals()) or 0
    except StartupError as error:
        return tell(error)
    except BaseExceptionGroup as group:
        if group.split(StartupError)[1] is not None:
            raise
        return tell(_first(group))


def tell(error: StartupError) -> int:
    """Write the error's one line to stderr. Returns the exit code."""
    print(f"{TOLD}{' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201
    return error.exit_code


def end_now(error: StartupError) -> NoReturn:
    """End the process with the error's line and code, whatever its threads are doing."""
    code = tell(error)
    sys.stdout.flush()
    os._exit(code)


def _first(group: BaseExceptionGroup[BaseException]) -> StartupError:
    first = group.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        return _first(first)
    if not isinstance(first, StartupError):
        raise first
    return first


def _stop(number: signal.Signals, shutdown: asyncio.Event) -> None:
    if shutdown.is_set():
        sys.stderr.flush()
        os._exit(128 + number)
    shutdown.set()
