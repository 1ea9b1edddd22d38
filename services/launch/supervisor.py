"""Supervisor that starts, restarts and stops the processes of a stack.

starting   a process that ends is fatal. Its last lines are shown, and all others are ended.
running    a process that ends is reported to the bootstrap, and started again after a back-off.
stopping   groups end one after the other. A process that outlives its group's deadline is killed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from baton.launch.child import Child, Show, describe_exit
from baton.launch.exit_reports import report_exit_repeatedly, wait
from baton.launch.restart_backoff import Backoff, describe_wait
from baton.launch.stack_plan import StackCommand
from baton.runtime.clock import Clock
from baton.runtime.errors import StartupError
from baton.runtime.service_process import StopRequested
from baton.worker.lifecycle.lazy_exit_report import ReportExit

POLL_S: Final = 0.1
KILL_TIMEOUT_S: Final = 5.0

Start = Callable[[StackCommand], Awaitable[Child]]


class PartDied(StartupError):
    """A process of the stack ended, or did not become ready, while the stack started."""


class Supervisor:
    """Supervisor of the processes of one stack. One task calls all of its methods."""

    def __init__(
        self,
        start: Start,
        report_exit: ReportExit,
        show: Show,
        clock: Clock,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._start = start
        self._report_exit = report_exit
        self._show = show
        self._clock = clock
        self._backoff = backoff
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._running = False
        self._died: PartDied | None = None

    async def start(
        self,
        parts: Sequence[StackCommand],
        is_up: Callable[[], Awaitable[bool]],
        timeout_ms: int,
        shutdown: asyncio.Event,
    ) -> None:
        """Start the processes `parts`, and return once `is_up` returns True.

        Raises PartDied if any process started so far ends, or after `timeout_ms` milliseconds. Raises
        StopRequested when `shutdown` is set.
        """
        for part in parts:
            await self._spawn(part)
            self._keepers[part.name] = asyncio.create_task(self._keep(part), name=f"keep {part.name}")
        deadline_ms = self._clock.now_ms() + timeout_ms
        while not await is_up():
            if shutdown.is_set():
                raise StopRequested
            if self._died is not None:
                raise self._died
            if self._clock.now_ms() >= deadline_ms:
                names = ", ".join(part.name for part in parts)
                raise PartDied(f"{names} not ready after {timeout_ms / 1000:g} s (--ready-timeout-ms)")
            await wait(shutdown, POLL_S)

    async def keep(self, shutdown: asyncio.Event) -> None:
        """Restart processes that end, until `shutdown` is set.

        Raises PartDied if a process ended before this call.
        """
        if self._died is not None:
            raise self._died
        self._running = True
        stopped = asyncio.create_task(shutdown.wait())
        await asyncio.wait((stopped, *self._keepers.values()), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for keeper in self._keepers.values():
            if keeper.done():
                keeper.result()

    async def stop(self, groups: Iterable[Sequence[StackCommand]], timeout_ms: int) -> bool:
        """Stop one group of processes after the other: SIGTERM, then SIGKILL after `timeout_ms` milliseconds.

        Return whether no process was killed.
        """
        self._stopping.set()
        is_clean = True
        for group in groups:
            is_clean &= await self._end(
                [part.name for part in group if part.name in self._keepers], timeout_ms
            )
        return is_clean

    async def _end(self, names: Sequence[str], timeout_ms: int) -> bool:
        keepers = [self._keepers[name] for name in names]
        if not keepers:
            return True
        for name in names:
            self._children[name].terminate()
        _, pending = await asyncio.wait(keepers, timeout=timeout_ms / 1000)
        if not pending:
            return True
        for name in names:
            if not self._keepers[name].done():
                self._show(f"{name} did not stop within {timeout_ms / 1000:g} s: killing it")
                self._children[name].kill()
        await asyncio.wait(pending, timeout=KILL_TIMEOUT_S)
        return False

    async def _spawn(self, part: StackCommand) -> Child:
        child = await self._start(part)
        self._children[part.name] = child
        if self._stopping.is_set():
            child.terminate()
        return child

    async def _keep(self, part: StackCommand) -> None:
        """Wait for the end of one process, report it and restart the process, until the stack stops."""
        backoff = self._backoff()
        child: Child | None = self._children[part.name]
        while child is not None:
            started_ms = self._clock.now_ms()
            code = await child.wait()
            if self._stopping.is_set():
                return
            if not self._running:
                self._died = self._died or _death(child, code)
                return
            wait_ms = backoff.next_ms(self._clock.now_ms() - started_ms)
            self._show_end(child, code, wait_ms)
            # Both at once: a bootstrap that takes no report must not delay the worker's return.
            _, child = await asyncio.gather(
                self._report_end(part, child), self._start_again(part, backoff, wait_ms)
            )

    async def _start_again(self, part: StackCommand, backoff: Backoff, wait_ms: int) -> Child | None:
        """Start a process again after a wait. Return the new child, or None if the stack is being stopped."""
        while True:
            await wait(self._stopping, wait_ms / 1000)
            if self._stopping.is_set():
                return None
            try:
                return await self._spawn(part)
            except OSError as error:
                wait_ms = backoff.next_ms(ran_ms=0)
                self._show(f"{part.name} cannot be started ({error}): trying again {describe_wait(wait_ms)}")

    def _show_end(self, child: Child, code: int, wait_ms: int) -> None:
        reason = child.startup_error()
        if code > 0 and reason is None:
            child.show_hidden_lines()
        because = f" ({reason})" if reason else ""
        self._show(f"{child.name} {describe_exit(code)}{because}: starting it again {describe_wait(wait_ms)}")

    async def _report_end(self, part: StackCommand, ended: Child) -> None:
        if not ended.exit_secret:
            return  # a launcher, whose ranks may still run
        for name in part.registers_as:
            reason = await report_exit_repeatedly(
                self._report_exit, name, ended.pid, ended.exit_secret, self._stopping
            )
            if reason is not None:
                self._show(f"the bootstrap could not be told that {name} ended ({reason})")


def _death(child: Child, code: int) -> PartDied:
    reason = child.startup_error()
    if reason is not None:
        return PartDied(f"{child.name}: {reason}")
    child.show_hidden_lines()
    return PartDied(f"{child.name} {describe_exit(code)} before it was ready")
