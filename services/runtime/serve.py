"""How does a service's process run, stop, and end when it cannot start?

signal              first: the shutdown event is set, the service drains;  second: exit at once
returns             exit code 0, or the number it returned
StartupError        one line on stderr, its exit code, no traceback
GroupLost, EngineStuck    the same, at once: no thread is waited for
StopAsked           exit code 0, at once as well
anything else       a bug: the traceback, exit code 1
a crash of a library    where each thread was, on stderr
"""

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, TypeVar

import uvloop

from services.runtime.errors import EngineStuck, GroupLost, StartupError
from services.runtime.logging import Log

log = Log(__name__)

TOLD: Final = "baton: error: "
"""How the one line begins."""

Main = Callable[[asyncio.Event], Awaitable[int | None]]
Outcome = TypeVar("Outcome")


class StopAsked(Exception):
    """The shutdown event was set before everything was up. Not an error."""


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
        except StopAsked:
            log.info("asked to stop before it was ready")
            _leave(0)
        except (GroupLost, EngineStuck) as error:
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


async def unless_stopped(shutdown: asyncio.Event, starting: Awaitable[Outcome]) -> Outcome:
    """What `starting` returns, or raises. Raises StopAsked when `shutdown` is set first, and leaves a thread
    behind that it waits for."""
    started, stopped = asyncio.ensure_future(starting), asyncio.create_task(shutdown.wait())
    try:
        await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            raise StopAsked
        return started.result()
    finally:
        started.cancel()
        stopped.cancel()


def tell(error: StartupError) -> int:
    """Write the error's one line to stderr. Returns the exit code."""
    print(f"{TOLD}{' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201
    return error.exit_code


def end_now(error: StartupError) -> NoReturn:
    """End the process with the error's line and code, whatever its threads are doing."""
    _leave(tell(error))


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
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
