"""Are all parts of the stack running, and what happens to one that is not?

starting   a part that ends is fatal: its last lines are shown, everything is ended
running    a part that ends is reported (its exit was seen: that is proof) and started again, with back-off
stopping   group by group, each with a deadline after which it is killed
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from baton.launch.child import Child, Say, describe_exit
from baton.launch.exit_reports import ReportExit, report_exit_repeatedly, wait
from baton.launch.restart_backoff import Backoff, describe_wait
from baton.launch.serve_settings import StackCommand
from baton.runtime.clock import Clock
from baton.runtime.errors import StartupError
from baton.runtime.service_process import StopRequested

POLL_S: Final = 0.1
KILL_TIMEOUT_S: Final = 5.0

Start = Callable[[StackCommand], Awaitable[Child]]


class PartDied(StartupError):
    """A part ended, or did not become ready, while the stack started."""


class Supervisor:
    """Keeps the children of one stack. Made, started, kept and stopped by one task."""

    def __init__(
        self,
        start: Start,
        report_exit: ReportExit,
        say: Say,
        clock: Clock,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._start = start
        self._report_exit = report_exit
        self._say = say
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
        """Start `parts` and return when `is_up`.

        Raises PartDied if any part started so far ends or `timeout_ms` has passed, StopRequested when
        `shutdown` is set.
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
        """From here on start parts again that end; return when `shutdown` is set.

        Raises PartDied if a part has just ended.
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
        """End every group in turn: SIGTERM, then SIGKILL after `timeout_ms`. True if none was killed."""
        self._stopping.set()
        clean = True
        for group in groups:
            clean &= await self._end([part.name for part in group if part.name in self._keepers], timeout_ms)
        return clean

    async def _end(self, names: Sequence[str], timeout_ms: int) -> bool:
        keepers = [self._keepers[name] for name in names]
        if not keepers:
            return True
        for name in names:
            self._children[name].ask_to_stop()
        _, pending = await asyncio.wait(keepers, timeout=timeout_ms / 1000)
        if not pending:
            return True
        for name in names:
            if not self._keepers[name].done():
                self._say(f"{name} did not stop within {timeout_ms / 1000:g} s: killing it")
                self._children[name].kill()
        await asyncio.wait(pending, timeout=KILL_TIMEOUT_S)
        return False

    async def _spawn(self, part: StackCommand) -> Child:
        child = await self._start(part)
        self._children[part.name] = child
        if self._stopping.is_set():
            child.ask_to_stop()
        return child

    async def _keep(self, part: StackCommand) -> None:
        """Follow one part until it ends for good."""
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
            self._say_end(child, code, wait_ms)
            # Side by side: a bootstrap that cannot be told now must not keep the worker away.
            _, child = await asyncio.gather(
                self._tell_exit(part, child), self._start_again(part, backoff, wait_ms)
            )

    async def _start_again(self, part: StackCommand, backoff: Backoff, wait_ms: int) -> Child | None:
        """None if the stack was stopped while waiting."""
        while True:
            await wait(self._stopping, wait_ms / 1000)
            if self._stopping.is_set():
                return None
            try:
                return await self._spawn(part)
            except OSError as error:
                wait_ms = backoff.next_ms(ran_ms=0)
                self._say(f"{part.name} cannot be started ({error}): trying again {describe_wait(wait_ms)}")

    def _say_end(self, child: Child, code: int, wait_ms: int) -> None:
        why = child.own_words()
        if code > 0 and why is None:
            child.show_hidden_lines()
        because = f" ({why})" if why else ""
        self._say(f"{child.name} {describe_exit(code)}{because}: starting it again {describe_wait(wait_ms)}")

    async def _tell_exit(self, part: StackCommand, ended: Child) -> None:
        if not ended.exit_secret:
            return  # a launcher, whose ranks may still run
        for name in part.registers_as:
            reason = await report_exit_repeatedly(
                self._report_exit, name, ended.pid, ended.exit_secret, self._stopping
            )
            if reason is not None:
                self._say(f"the bootstrap could not be told that {name} ended ({reason})")


def _death(child: Child, code: int) -> PartDied:
    why = child.own_words()
    if why is not None:
        return PartDied(f"{child.name}: {why}")
    child.show_hidden_lines()
    return PartDied(f"{child.name} {describe_exit(code)} before it was ready")
