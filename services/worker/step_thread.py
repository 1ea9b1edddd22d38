"""How does a step of the model run without the turn loop waiting for it?

One thread, one step at a time, so that no turn waits for it (`no-blocking`). The loop starts a
step, is called when it has ended, and takes its tokens in a later turn.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from baton.engine_interface import EngineLost, PageSumRequest, RankGroupBroken, Row, RowResult, Steps
from baton.runtime.clock import Clock
from baton.runtime.errors import EngineStuck
from baton.runtime.logging import Log

log = Log(__name__)

STEP_MS: Final = 600_000
"""No step takes this long, also one that waits for other ranks: a device or a library hangs."""
END_S: Final = 2.0
FAILED_MAX: Final = 8
"""Steps in a row: where so many fail, none will do."""


class StepFailed(Exception):
    """The engine raised, on every rank of the worker. What the step was to write is not to be used."""


class StepThread:
    """Used from one event loop. `on_done` is called in it when a step has ended."""

    def __init__(
        self,
        engine: Steps,
        on_done: Callable[[], None],
        thread: Executor | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`thread`: runs one step at a time. Not given: one of its own, which the engine binds. `clock`:
        where others have steps made there, too."""
        self._engine = engine
        self._on_done = on_done
        self._thread = thread or ThreadPoolExecutor(
            1, thread_name_prefix="engine", initializer=engine.bind_thread
        )
        self._running: asyncio.Future[Any] | None = None
        self._summing = False
        """What runs is a sum of pages, not a step."""
        self._failed = 0
        """Steps in a row."""
        self._clock = clock
        self.waited_us = 0
        """Microseconds for which the last run waited while the thread ran another's."""

    @property
    def free(self) -> bool:
        """Nothing is running, and what the last run gave was taken."""
        return self._running is None

    def start(self, rows: Sequence[Row]) -> None:
        """Start a step. Only while `free`."""
        self._start(self._engine.step, rows, summing=False)

    def start_sum(self, parts: Sequence[PageSumRequest]) -> None:
        """Carry sums of pages on, between two steps. Only while `free`."""
        self._start(self._engine.sum_pages, parts, summing=True)

    def take(self) -> Sequence[RowResult] | None:
        """What comes of the ended step, one entry a row; None while it runs or when there was none.

        Raises StepFailed, once, when the engine raised; EngineLost when it has raised FAILED_MAX times in a
        row or says so itself; and RankGroupBroken as it is: then it raised on some rank. By both this worker
        has to end.
        """
        ended = self._ended(summing=False)
        if ended is None:
            return None
        self._failed = 0
        taken: Sequence[RowResult] = ended.result()
        return taken

    def take_sum(self) -> bool:
        """The sums that were started are there; said once. Raises StepFailed as `take` does."""
        return self._ended(summing=True) is not None

    async def end(self) -> None:
        """Nothing is started any more. Raises EngineStuck when what runs has not ended within END_S."""
        self.close(wait=False)
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=END_S)
            if not self._running.done():
                raise EngineStuck(f"a step of the model has not ended {END_S:g} s after everything else")

    def close(self, *, wait: bool = True) -> None:
        """End the thread once the running step, if any, has ended; `wait` for it, or leave it to itself."""
        self._thread.shutdown(wait=wait)

    def _start(self, work: Callable[[Any], Any], given: Sequence[Any], *, summing: bool) -> None:
        if self._running is not None:
            raise RuntimeError("a step is running")
        loop = asyncio.get_running_loop()
        self._summing = summing
        if self._clock is not None:
            work = partial(self._begin, work, self._clock, self._clock.host_us())
        self._running = loop.run_in_executor(self._thread, work, given)
        self._running.add_done_callback(lambda _: self._on_done())

    def _begin(self, work: Callable[[Any], Any], clock: Clock, asked_us: int, given: Sequence[Any]) -> Any:
        """In the thread."""
        self.waited_us = clock.host_us() - asked_us
        return work(given)

    def _ended(self, *, summing: bool) -> asyncio.Future[Any] | None:
        if self._running is None or self._summing is not summing or not self._running.done():
            return None
        ended, self._running = self._running, None
        error = ended.exception()
        if isinstance(error, RankGroupBroken):
            raise error
        if error is not None:
            log.error("a step failed", error=error)
            if isinstance(error, EngineLost):
                raise error
            self._failed += 1
            text = f"{type(error).__name__}: {error}"
            if self._failed == FAILED_MAX:
                raise EngineLost(f"{self._failed} steps in a row failed, the last by {text}") from error
            raise StepFailed(text) from error
        return ended
