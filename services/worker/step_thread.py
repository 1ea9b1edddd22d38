"""Thread that runs engine steps, so that no turn waits for one (`no-blocking`).

It runs one step at a time. The turn loop starts a step, is called when it has ended, and takes its tokens
in a later turn.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from baton.engine_interface import (
    EngineLost,
    PageSumRequest,
    RankGroupBroken,
    Row,
    RowResult,
    Steps,
)
from baton.engine_interface import Sequence as TokenSequence
from baton.runtime.clock import Clock
from baton.runtime.errors import EngineStuck
from baton.runtime.logging import Log

log = Log(__name__)

STEP_MS: Final = 600_000
"""Milliseconds after which a running step counts as stuck. Time in which the step waits for other ranks
counts as well."""
END_S: Final = 2.0
FAILED_MAX: Final = 8
"""Number of consecutive failed steps after which the engine counts as lost."""


class StepFailed(Exception):
    """Error: the engine failed in a step, on every rank of the worker. The output of the step must not be
    used."""


class StepThread:
    """Thread that runs the steps of an engine. It is used from one event loop, and calls `on_done` there when
    a step has ended."""

    def __init__(
        self,
        engine: Steps,
        on_done: Callable[[], None],
        thread: Executor | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Make a step thread.

        `thread`: executor that runs one step at a time. None: its own thread, which the engine binds.
        `clock`: clock to measure waits for the thread, if other workers use it, too. Otherwise None.
        """
        self._engine = engine
        self._on_done = on_done
        self._thread = thread or ThreadPoolExecutor(
            1, thread_name_prefix="engine", initializer=engine.bind_thread
        )
        self.running: asyncio.Future[Any] | None = None
        self._summing = False
        """Whether the thread is computing checksums of pages, and not a step."""
        self._live: set[TokenSequence] = set()
        """Sequences that had a row in some step and for which the engine still has state."""
        self._stepping: set[TokenSequence] = set()
        """Sequences that have a row in the running step."""
        self._ended_sequences: list[TokenSequence] = []
        """Sequences of the running step that are to be released when it has ended."""
        self._failed = 0
        """Number of steps that have failed in a row so far."""
        self._clock = clock
        self.waited_us = 0
        """Microseconds that the last step or sum waited, because the thread was running another worker's
        step."""

    @property
    def free(self) -> bool:
        """Whether the thread runs neither a step nor a sum for this worker, and the last result was taken."""
        return self.running is None

    def start(self, rows: Sequence[Row]) -> None:
        """Start an engine step with these rows. Call it only while `free`."""
        self._start(self._engine.step, rows, summing=False)
        self._stepping = {row.sequence for row in rows}
        self._live |= self._stepping

    def release(self, sequence: TokenSequence) -> None:
        """Tell the engine that no later step has a row of `sequence` (`each-is-released`).

        The engine is told once, as soon as no step of the sequence runs. It is not told if no step had a row
        of the sequence.
        """
        if sequence not in self._live:
            return
        self._live.discard(sequence)
        if sequence in self._stepping:
            self._ended_sequences.append(sequence)
        else:
            self._engine.release(sequence)

    def start_sum(self, parts: Sequence[PageSumRequest]) -> None:
        """Start to compute checksums of pages on the engine's thread, between two steps. Call it only while
        `free`."""
        self._start(self._engine.sum_pages, parts, summing=True)

    def take(self) -> Sequence[RowResult] | None:
        """Return the results of the ended step, one for each row. Return None if a step is running, or none
        was started.

        Raises StepFailed once if the engine raised an error. Raises EngineLost if the engine reports that, or
        failed FAILED_MAX times in a row. Raises RankGroupBroken if the error came on some ranks only. After
        the last two the worker has to end.
        """
        ended = self._ended(summing=False)
        if ended is None:
            return None
        self._failed = 0
        taken: Sequence[RowResult] = ended.result()
        return taken

    def take_sum(self) -> bool:
        """Return whether the started checksums of pages are complete. Returns True only once for each start.
        Raises the errors of `take`."""
        return self._ended(summing=True) is not None

    async def end(self) -> None:
        """Stop starting steps, and wait for a running one. Raises EngineStuck if it has not ended within
        END_S."""
        self.close(wait=False)
        if self.running is not None:
            await asyncio.wait({self.running}, timeout=END_S)
            if not self.running.done():
                raise EngineStuck(f"a step of the model has not ended {END_S:g} s after everything else")

    def close(self, *, wait: bool = True) -> None:
        """End the thread when the running step has ended. `wait`: whether to block until then."""
        self._thread.shutdown(wait=wait)

    def _start(self, work: Callable[[Any], Any], given: Sequence[Any], *, summing: bool) -> None:
        if self.running is not None:
            raise RuntimeError("a step is running")
        loop = asyncio.get_running_loop()
        self._summing = summing
        if self._clock is not None:
            work = partial(self._begin, work, self._clock, self._clock.host_us())
        self.running = loop.run_in_executor(self._thread, work, given)
        self.running.add_done_callback(lambda _: self._on_done())

    def _begin(
        self, work: Callable[[Any], Any], clock: Clock, submitted_us: int, given: Sequence[Any]
    ) -> Any:
        """Run `work` in the engine's thread, and record how long it waited for the thread."""
        self.waited_us = clock.host_us() - submitted_us
        return work(given)

    def _ended(self, *, summing: bool) -> asyncio.Future[Any] | None:
        if self.running is None or self._summing is not summing or not self.running.done():
            return None
        ended, self.running = self.running, None
        if not summing:
            self._release_ended()
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

    def _release_ended(self) -> None:
        self._stepping = set()
        for sequence in self._ended_sequences:
            self._engine.release(sequence)
        self._ended_sequences.clear()
