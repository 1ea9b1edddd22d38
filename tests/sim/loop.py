"""Event loop without I/O, in which time passes for many processes the same way in every run.

An event loop without I/O. Time is a number: it stands still while anything can run, and then jumps to the
next timer. Each callback belongs to the process in whose context it was scheduled, so that one process can
be paused (what it has to do waits, while its clock goes on), killed (it never runs again) or busy (its core
is taken, and whatever else it has to do waits), alone.
"""

import asyncio
import contextvars
import heapq
from asyncio import events, tasks
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from enum import Enum
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

START_S: Final = 1_000.0

STEPS_MAX: Final = 50_000_000
"""Callbacks in one run: far above what any takes."""
STEPS_AT_ONCE_MAX: Final = 500_000
"""Callbacks while time stands still: something goes round in circles."""
CANCELLED_TIMERS_MAX: Final = 4_096


class Deadlock(Exception):
    """Raised when nothing can run and no timer is set, while something is still waited for."""


class Livelock(Exception):
    """Time stands still although callback after callback runs."""


class Life(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class SimulatedProcess:
    """A process of the simulated machines. `name` is for people, `host` is where the network finds it."""

    def __init__(self, loop: "VirtualLoop", name: str, host: str) -> None:
        self._loop = loop
        self.name = name
        self.host = host
        self.life = Life.RUNNING
        self.held: list[SimulatedHandle] = []
        self.busy_until_s = 0.0
        self.waking = False
        self.handled_s = 0.0
        """Seconds of the process's core that handlers of messages have used."""
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        self.on_death: list[Callable[[], None]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        """Kept: one that is collected would run its `finally` after its process' death."""

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD

    def spawn(self, work: Coroutine[Any, Any, Result], name: str | None = None) -> asyncio.Task[Result]:
        task = NumberedTask(work, self._loop, name, self.context)
        self.tasks.append(task)
        return task

    def soon(self, callback: Callable[..., object], *args: object) -> None:
        """Run `callback` in this process, if it lives."""
        if self.life is not Life.DEAD:
            self._loop.call_soon(callback, *args, context=self.context)

    def pause(self) -> None:
        if self.life is Life.RUNNING:
            self.life = Life.PAUSED

    def resume(self) -> None:
        if self.life is Life.PAUSED:
            self.life = Life.RUNNING
            held, self.held = self.held, []
            self._loop.again(held)

    def compute(self, seconds: float) -> None:
        """Occupy the process's core for `seconds`, from the end of the running callback."""
        self.busy_until_s = max(self.busy_until_s, self._loop.time()) + seconds

    @property
    def waits(self) -> bool:
        """Return whether a callback of the process could run at once."""
        return self._loop.queued(self) or bool(self.held)

    def kill(self) -> None:
        """End the process. No code of it runs any more, not even its cleanup."""
        self.life = Life.DEAD
        self.held.clear()
        for tell in list(self.on_death):
            tell()


PROCESS: Final[contextvars.ContextVar[SimulatedProcess]] = contextvars.ContextVar("process")


def this_process() -> SimulatedProcess:
    """Return the simulated process whose code is running. Raises LookupError in the simulation's own code."""
    return PROCESS.get()


class SimulatedHandle(events.Handle):
    """A callback of one process, with the fields that asyncio's own loops expect."""

    __slots__ = ()

    @property
    def process(self) -> SimulatedProcess | None:
        """The process in whose context it was scheduled. None: the simulation itself."""
        context: contextvars.Context = self._context  # type: ignore[attr-defined]
        return context.get(PROCESS)

    def run(self) -> None:
        """Run the callback. Raises what it raises."""
        self._context.run(self._callback, *self._args)  # type: ignore[attr-defined]


class SimulatedTimer(SimulatedHandle, events.TimerHandle):
    __slots__ = ()


class NumberedTask(tasks.Task[Result]):
    """A group of tasks ends them in the order of their hashes. These are by number, and not by address: one
    seed is one run in every process."""

    def __init__(
        self,
        work: Coroutine[Any, Any, Result],
        loop: "VirtualLoop",
        name: str | None,
        context: contextvars.Context | None,
    ) -> None:
        self._number = loop.number_task()
        super().__init__(work, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number

    def forget(self) -> None:
        """Let it be collected unended, without a complaint in the log."""
        self._log_destroy_pending = False


class VirtualLoop(asyncio.BaseEventLoop):
    """Use by `run_until`, once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = START_S
        self._queue: deque[SimulatedHandle] = deque()
        self._timers: list[tuple[float, int, SimulatedTimer]] = []
        self._number = 0
        self._cancelled = 0
        self._over = False
        self.steps = 0
        self._tasks_made = 0
        self.problems: list[str] = []
        """Errors that no code has handled. Each is a bug of the code that raised it."""

    def time(self) -> float:
        return self._now

    def run_until(self, task: asyncio.Task[Result]) -> Result:
        """Let time pass until `task` has ended. Raises what it raised, Deadlock and Livelock."""
        events._set_running_loop(self)
        try:
            self._turn(task)
            return task.result()
        finally:
            self._over = True
            events._set_running_loop(None)

    def number_task(self) -> int:
        self._tasks_made += 1
        return self._tasks_made

    def again(self, handles: list[SimulatedHandle]) -> None:
        self._queue.extend(handles)

    def queued(self, process: SimulatedProcess) -> bool:
        return any(handle.process is process for handle in self._queue if not handle.cancelled())

    def forget(self) -> None:
        """Forget what is left over: it never runs."""
        self._over = True
        self._queue.clear()
        self._timers.clear()
        for task in asyncio.all_tasks(self):
            assert isinstance(task, NumberedTask)
            task.forget()
        self.close()

    # ---- asyncio's side

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> events.Handle:
        handle = SimulatedHandle(callback, args, self, context)
        self._queue.append(handle)
        return handle

    def call_soon_threadsafe(self, callback, *args, context=None):  # type: ignore[no-untyped-def, override]
        raise AssertionError("nothing here runs in another thread")

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor, work: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run in an executor of the simulation, which ends the call in this thread."""
        future = self.create_future()

        def ended(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)
                future.exception()  # a process that dies meanwhile never asks

        executor.submit(work, *args).add_done_callback(ended)
        return future

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> events.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> events.TimerHandle:
        handle = SimulatedTimer(when, callback, args, self, context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle))
        return handle

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > CANCELLED_TIMERS_MAX:
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Result],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Result]:
        return NumberedTask(coro, self, name, context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._over:
            self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    # ---- time

    def _turn(self, until: asyncio.Task[Any]) -> None:
        queue, at_once, moment = self._queue, 0, self._now
        while not until.done():
            if not queue:
                self._advance()
            if self._now != moment:
                moment, at_once = self._now, 0
            count = len(queue)
            at_once += count
            self.steps += count
            if at_once > STEPS_AT_ONCE_MAX or self.steps > STEPS_MAX:
                raise Livelock(f"{at_once} callbacks at {self._now:.3f} s, {self.steps} in all")
            for _ in range(count):
                handle = queue.popleft()
                if handle.cancelled():
                    continue
                process = handle.process
                if process is None or (process.life is Life.RUNNING and process.busy_until_s <= self._now):
                    try:
                        handle.run()
                    except Exception as error:
                        self.call_exception_handler({"message": repr(handle), "exception": error})
                elif process.life is not Life.DEAD:
                    process.held.append(handle)
                    self._wake(process)

    def _wake(self, process: SimulatedProcess) -> None:
        """Wake the process when its core is free again."""
        if process.busy_until_s > self._now and not process.waking:
            process.waking = True
            self.call_at(process.busy_until_s, self._free, process)

    def _free(self, process: SimulatedProcess) -> None:
        process.waking = False
        if process.life is Life.RUNNING:
            held, process.held = process.held, []
            self.again(held)

    def _advance(self) -> None:
        timers, queue = self._timers, self._queue
        while timers and not queue:
            when = timers[0][0]
            self._now = max(self._now, when)
            while timers and timers[0][0] <= self._now:
                handle = heapq.heappop(timers)[2]
                if handle.cancelled():
                    self._cancelled -= 1
                else:
                    queue.append(handle)
        if not queue:
            raise Deadlock("nothing can run, and no timer is set")
